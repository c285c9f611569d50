#include "tests/cpp/device/twins.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorImpl.h>

#include "tests/cpp/device/memory.h"
#include "tests/cpp/device/streams.h"

namespace smp::late {
namespace {

void keep_nothing(void*) {}

}  // namespace

c10::Storage Twins::storage_of(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  auto [entry, is_new] =
      storages_.try_emplace(storage.unsafeGetStorageImpl(), c10::Storage());
  if (!is_new) return entry->second;
  const bool is_meta = type_ == c10::kMeta;  // operators may resize those
  void* begin = is_meta ? nullptr : touchable(storage.data());
  entry->second =
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                   c10::DataPtr(begin, begin, &keep_nothing, type_),
                   is_meta ? c10::GetAllocator(c10::kMeta) : nullptr, is_meta);
  return entry->second;
}

at::Tensor Twins::make(const at::Tensor& tensor) {
  const bool is_ours = tensor.device().type() == kType;
  at::Tensor twin;
  if (is_ours) {
    const auto key =
        type_ == c10::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
    twin = at::detail::make_tensor<c10::TensorImpl>(
        storage_of(tensor), c10::DispatchKeySet(key), tensor.dtype());
    twin.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
  } else if (type_ == c10::kCPU || tensor.dim() == 0) {
    twin = tensor.clone();  // numbers are of the CPU for meta kernels as well
  } else {
    twin = at::empty_strided(tensor.sizes(), tensor.strides(),
                             tensor.options().device(type_));
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    twin.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return twin;
}

at::Tensor Twins::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto [entry, is_new] =
      tensors_.try_emplace(tensor.unsafeGetTensorImpl(), at::Tensor());
  if (is_new) entry->second = make(tensor);
  return entry->second;
}

c10::IValue Twins::of(const c10::IValue& value) {
  if (value.isTensor()) return of(value.toTensor());
  if (value.isDevice() && value.toDevice().type() == kType) {
    return c10::Device(type_);
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> twins;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      twins.push_back(of(tensor));
    }
    return twins;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> twins;
    for (const std::optional<at::Tensor>& tensor :
         value.toOptionalTensorList()) {
      twins.push_back(tensor ? std::optional(of(*tensor)) : std::nullopt);
    }
    return twins;
  }
  return value;
}

}  // namespace smp::late
