#pragma once

#include <ATen/core/Tensor.h>

namespace smp::lanes {

/// Returns the numbers of a tensor in plain memory order, on the same device,
/// in memory without other writers; on the current stream. A copy on the device
/// takes a tenth of the time of a copy to another device. The caller's stream,
/// which may write to the tensor, thus does not wait for the longer copy.
inline at::Tensor own_plain_tensor(const at::Tensor& source, bool is_stable) {
  at::Tensor data = source.detach().resolve_conj().resolve_neg().contiguous();
  return !is_stable && data.is_alias_of(source) ? data.clone() : data;
}

}  // namespace smp::lanes
