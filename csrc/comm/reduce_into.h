#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// Elements that are reduced at a time: below what makes torch use its threads,
/// and in the cache.
inline constexpr int64_t kReduceElements = 16 << 10;

/// `to` becomes the sum, or the larger or smaller, of both; flat tensors of one
/// size and dtype of the host.
void reduce_into(const at::Tensor& to, const at::Tensor& from, ReduceOp op);

}  // namespace smp::comm
