#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/tensor_parallel/group.h"
#include "csrc/tensor_parallel/regions.h"

namespace smp::tensor_parallel {

/// Which tokens of this rank go to which ranks of a group, and how many come
/// from there. A token goes to a rank once, however many of its experts are
/// there, so no rank gets more rows than the group has tokens.
struct Routes {
  at::Tensor order;      ///< int64: token of each row that is sent, by rank
  Sizes sent;            ///< rows to each rank
  Sizes received;        ///< rows from each rank
  int64_t num_tokens;    ///< of this rank
  int64_t num_pairs;     ///< of a row here and an expert of this rank
  int64_t group_tokens;  ///< of all ranks
  bool was_alone;        ///< made without the others, see `route`
};

using RoutesPtr = std::shared_ptr<Routes>;

/// Where the experts that tokens have chosen are. Collective: the hosts
/// exchange how many rows they send. Numbers of a device are waited for, once.
///
/// Without data, and where `alone` lives, every token stays, and each of its
/// experts counts as one of this rank: what a rank has on average.
///
/// @param experts  int64 [tokens, k], numbers of experts of the whole layer
/// @param sizes  experts of each rank, in their order
/// @throws ValueError when the sizes are not those of the group; on all ranks
///     when they disagree on them or on k
RoutesPtr route(const GroupPtr& group, const at::Tensor& experts,
                const Sizes& sizes);

/// Sends rows of each tensor [tokens, *] along the routes: [rows, *], those of
/// group rank 0 first. Backward: the gradients of a token's rows come back and
/// are added up in the order of the ranks; all tensors in one node, so that
/// ranks that use some of them only issue the same collectives.
std::vector<at::Tensor> dispatch(const GroupPtr& group,
                                 const std::vector<at::Tensor>& tensors,
                                 const RoutesPtr& routes);

/// The inverse: results of rows [rows, *] go back and are added up, in the
/// order of the ranks: [tokens, *]. Backward: `dispatch` of the gradient.
at::Tensor combine(const GroupPtr& group, const at::Tensor& y,
                   const RoutesPtr& routes);

}  // namespace smp::tensor_parallel
