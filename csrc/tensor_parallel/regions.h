#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/tensor_parallel/group.h"

namespace smp::tensor_parallel {

/// Borders between data of one rank of a group and data of the whole group, for
/// autograd. Each function names the operation of its backward. Without a
/// second derivative. All are the identity in a group of one.
using GroupPtr = std::shared_ptr<Group>;

/// The meaning of the gradients of a gathered tensor on the ranks.
enum class GatheredGrad {
  kSum,  ///< parts of a sum, because each rank went on with other weights
  kOwn,  ///< equal gradients, because all ranks went on alike
};

/// Returns the same tensor; backward: all-reduce.
at::Tensor copy(const GroupPtr& group, const at::Tensor& x);

/// Returns the sum over the ranks; backward: the same gradient.
at::Tensor reduce(const GroupPtr& group, const at::Tensor& x);

/// Returns the parts of all ranks along `dim`; backward: reduce-scatter or own
/// part.
at::Tensor gather(const GroupPtr& group, const at::Tensor& x, int64_t dim,
                  const Sizes& sizes, GatheredGrad grad);

/// Returns the own part of the sum along `dim`; backward: all-gather.
at::Tensor reduce_scatter(const GroupPtr& group, const at::Tensor& x,
                          int64_t dim, const Sizes& sizes);

/// Returns the own part along `dim`; backward: all-gather.
at::Tensor scatter(const GroupPtr& group, const at::Tensor& x, int64_t dim,
                   const Sizes& sizes);

/// Runs an all-to-all: splits one dim and has another one whole; backward: the
/// inverse.
at::Tensor exchange(const GroupPtr& group, const at::Tensor& x,
                    int64_t split_dim, int64_t concat_dim,
                    const Sizes& split_sizes, const Sizes& concat_sizes);

/// Returns products of one gathered input with several weights [out, in], plus
/// biases where they are defined. Keeps only the own part of the input and
/// gathers again in backward, where the sum of the input gradients is
/// reduce-scattered once. Without a dim the input is whole on every rank, and
/// its gradient is all-reduced. An input [c, 1, ..., in] that is gathered along
/// dim 1 in equal parts is gathered in c pieces, each beside the products of
/// the one before, unless operands have 8 bits; its gradient is sent likewise.
/// @param fp8  scaling of operands of 8 bits (`nn::fp8_scaling`); none: they
///     keep their dtype
std::vector<at::Tensor> gathered_linears(
    const GroupPtr& group, const at::Tensor& x,
    const std::vector<at::Tensor>& weights,
    const std::vector<at::Tensor>& biases, std::optional<int64_t> dim,
    const Sizes& sizes, const std::optional<std::string>& fp8 = std::nullopt);

/// Returns this rank's part [c, 1, ..., out] of the sum over the ranks of a
/// product of x [c, t, ..., in] and a weight [out, in], in which block i of
/// dim 1 is for group rank i. The sum of a piece is on its way while the
/// product of the next one runs; backward: gathers gradients likewise.
/// @param other  second term of this rank, of the shape of the product
at::Tensor summed_linear(const GroupPtr& group, const at::Tensor& x,
                         const at::Tensor& weight,
                         const std::optional<at::Tensor>& other);

}  // namespace smp::tensor_parallel
