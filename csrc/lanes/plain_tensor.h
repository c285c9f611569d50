#pragma once

#include <ATen/core/Tensor.h>

namespace smp::lanes {

/// The numbers of a tensor as they lie in memory, in the usual order, on the
/// same device, where nobody writes to them; on the current stream. A copy on
/// the device takes a tenth of the way to another place: the stream of the
/// caller, who may write to the tensor, need not wait for that.
inline at::Tensor own_plain_tensor(const at::Tensor& source, bool is_stable) {
  at::Tensor data = source.detach().resolve_conj().resolve_neg().contiguous();
  return !is_stable && data.is_alias_of(source) ? data.clone() : data;
}

}  // namespace smp::lanes
