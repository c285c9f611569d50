#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// Elements that are reduced at a time: too few for torch to use its threads,
/// and few enough for the cache.
inline constexpr int64_t kReduceElements = 16 << 10;

/// Sets `to` to the sum, or the larger or smaller, of both. Both are flat host
/// tensors of one size and dtype.
void reduce_into(const at::Tensor& to, const at::Tensor& from, ReduceOp op);

}  // namespace smp::comm
