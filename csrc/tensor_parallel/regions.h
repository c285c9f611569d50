#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "csrc/tensor_parallel/group.h"

namespace smp::tensor_parallel {

/// Borders between what a rank of a group has for itself and what the group
/// has together, for autograd. Each names what the backward does. Without a
/// second derivative. All are the identity in a group of one.
using GroupPtr = std::shared_ptr<Group>;

/// What the gradients of a gathered tensor are on the ranks.
enum class GatheredGrad {
  kSum,  ///< parts of a sum, because each rank went on with other weights
  kOwn,  ///< the same, because all ranks went on alike
};

/// The same tensor; backward: all-reduce.
at::Tensor copy(const GroupPtr& group, const at::Tensor& x);

/// The sum over the ranks; backward: the same gradient.
at::Tensor reduce(const GroupPtr& group, const at::Tensor& x);

/// The parts of all ranks along `dim`; backward: reduce-scatter or own part.
at::Tensor gather(const GroupPtr& group, const at::Tensor& x, int64_t dim,
                  const Sizes& sizes, GatheredGrad grad);

/// The own part of the sum along `dim`; backward: all-gather.
at::Tensor reduce_scatter(const GroupPtr& group, const at::Tensor& x,
                          int64_t dim, const Sizes& sizes);

/// The own part along `dim`; backward: all-gather.
at::Tensor scatter(const GroupPtr& group, const at::Tensor& x, int64_t dim,
                   const Sizes& sizes);

/// All-to-all: splits one dim and has another one whole; backward: the inverse.
at::Tensor exchange(const GroupPtr& group, const at::Tensor& x,
                    int64_t split_dim, int64_t concat_dim,
                    const Sizes& split_sizes, const Sizes& concat_sizes);

/// Products of one gathered input with several weights [out, in], plus biases
/// where they are defined. Keeps the own part of the input alone and gathers
/// again in backward, where the sum of the input gradients is reduce-scattered
/// once. Without a dim the input is whole on every rank, and its gradient
/// all-reduced.
std::vector<at::Tensor> gathered_linears(const GroupPtr& group,
                                         const at::Tensor& x,
                                         const std::vector<at::Tensor>& weights,
                                         const std::vector<at::Tensor>& biases,
                                         std::optional<int64_t> dim,
                                         const Sizes& sizes);

}  // namespace smp::tensor_parallel
