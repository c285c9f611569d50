// The Python extension smp_late: what smp needs to run on the late device.

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "tests/cpp/optim/late/late_kernels.h"

namespace {

// Parameters move between the CPU and the device by `.data = ...`, as with
// CUDA, for which PyTorch permits it by a list of devices.
bool is_exchangeable(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided &&
           (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return is_dense(self) && is_dense(from);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &is_exchangeable);
}

}  // namespace

// Import smp._C first.
PYBIND11_MODULE(smp_late, m) {
  m.def(
      "install",
      [](uintptr_t enqueue, uintptr_t touchable) {
        using smp::late_kernels::Device;
        smp::late_kernels::install(
            {reinterpret_cast<decltype(Device::enqueue)>(enqueue),
             reinterpret_cast<decltype(Device::touchable)>(touchable)});
      },
      "Makes smp's operators work on the late device; takes its addresses().");
}
