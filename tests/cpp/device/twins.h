#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceType.h>

#include <optional>
#include <unordered_map>
#include <vector>

namespace smp::late {

/// Makes tensors for one call of an operator that look like tensors of the late
/// device, on the CPU or as meta tensors. Those of the CPU use the device's
/// memory and do not keep it, as kernels do. Storages that were shared stay
/// shared, and one tensor has one twin.
class Twins {
 public:
  explicit Twins(c10::DeviceType type) : type_(type) {}

  /// Returns the twin; tensors of the CPU are copied, because a kernel sees
  /// them as they are when it is queued.
  at::Tensor of(const at::Tensor& tensor);
  /// Replaces tensors, in lists too, and devices.
  c10::IValue of(const c10::IValue& value);

 private:
  c10::Storage storage_of(const at::Tensor& tensor);
  at::Tensor make(const at::Tensor& tensor);

  const c10::DeviceType type_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> tensors_;
};

/// Calls `visit` with each tensor of a value, also in lists.
template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      for_each_tensor(element, visit);
    }
  }
}

}  // namespace smp::late
