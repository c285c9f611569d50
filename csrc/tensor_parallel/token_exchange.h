#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/tensor_parallel/group.h"
#include "csrc/tensor_parallel/regions.h"

namespace smp::tensor_parallel {

/// The routes of tokens: the tokens of this rank for each rank of a group, and
/// the number of tokens from each. A token is sent to a rank once, however many
/// of its experts are there, so no rank gets more rows than the group has
/// tokens.
struct Routes {
  at::Tensor order;      ///< int64: token of each row that is sent, by rank
  Sizes sent;            ///< rows to each rank
  Sizes received;        ///< rows from each rank
  int64_t num_tokens;    ///< on this rank
  int64_t num_pairs;     ///< pairs of a row here and an expert of this rank
  int64_t group_tokens;  ///< on all ranks
  bool was_alone;        ///< made without other ranks, see `route`
};

using RoutesPtr = std::shared_ptr<Routes>;

/// Finds the ranks of the experts that tokens have chosen. Collective: the
/// hosts exchange the numbers of rows they send. The host waits for numbers of
/// a device, once.
///
/// Without data, and while `alone` is set, every token stays, and each of its
/// experts counts as one of this rank: a rank has so many on average.
///
/// @param experts  int64 [tokens, k], numbers of experts of the whole layer
/// @param sizes  experts of each rank, in their order
/// @throws ValueError when the sizes do not fit the group; on all ranks when
///     they disagree on the sizes or on k
RoutesPtr route(const GroupPtr& group, const at::Tensor& experts,
                const Sizes& sizes);

/// Sends rows of each tensor [tokens, *] along the routes: [rows, *], rows of
/// group rank 0 first. Backward: the gradients of a token's rows come back and
/// are added up in the order of the ranks. All tensors are in one node: ranks
/// that use only some of them still issue the same collectives.
std::vector<at::Tensor> dispatch(const GroupPtr& group,
                                 const std::vector<at::Tensor>& tensors,
                                 const RoutesPtr& routes);

/// Inverts `dispatch`: results of rows [rows, *] are sent back and added up, in
/// the order of the ranks: [tokens, *]. Backward: `dispatch` of the gradient.
at::Tensor combine(const GroupPtr& group, const at::Tensor& y,
                   const RoutesPtr& routes);

}  // namespace smp::tensor_parallel
