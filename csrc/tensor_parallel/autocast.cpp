#include "csrc/tensor_parallel/autocast.h"

#include <ATen/autocast_mode.h>

namespace smp::tensor_parallel {

at::Tensor as_autocast(const at::Tensor& tensor) {
  const at::DeviceType device = tensor.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return tensor;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device),
                                   tensor, device);
}

}  // namespace smp::tensor_parallel
