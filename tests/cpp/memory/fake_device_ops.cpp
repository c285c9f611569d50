// Operators of PyTorch for tensors of the fake device.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tests/cpp/memory/fake_device.h"
#include "tests/cpp/memory/fake_device_streams.h"

namespace smp::fake_device {
namespace {

constexpr auto kKind = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor fake_empty(at::IntArrayRef sizes,
                      std::optional<at::ScalarType> dtype,
                      std::optional<at::Layout>,
                      std::optional<at::Device> where, std::optional<bool>,
                      std::optional<at::MemoryFormat> format) {
  note("aten::empty", where && where->has_index() ? where->index() : -1);
  const c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_generic(sizes, c10::GetAllocator(kKind), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor fake_empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                              std::optional<at::ScalarType> dtype,
                              std::optional<at::Layout>,
                              std::optional<at::Device> where,
                              std::optional<bool>) {
  note("aten::empty_strided",
       where && where->has_index() ? where->index() : -1);
  const c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_strided_generic(sizes, strides,
                                           c10::GetAllocator(kKind), kKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& fake_resize(const at::Tensor& self, at::IntArrayRef sizes,
                              std::optional<at::MemoryFormat>) {
  note("aten::resize_", self.device().index());
  const c10::DeviceGuard guard(self.device());
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  const auto needed =
      static_cast<size_t>(c10::multiply_integers(sizes)) * self.itemsize();
  c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) {
    storage->set_data_ptr_noswap(c10::GetAllocator(kKind)->allocate(needed));
    storage->set_nbytes(needed);
  }
  impl->set_sizes_contiguous(sizes);
  return self;
}

// The same memory for the host, without a share in it, as a copy engine has.
at::Tensor memory_of(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()),
                       tensor.sizes(), tensor.strides(),
                       at::TensorOptions(tensor.scalar_type()));
}

at::Tensor fake_copy(const at::Tensor& self, const at::Tensor& to,
                     bool non_blocking) {
  const at::Device where =
      to.device().type() == kKind ? to.device() : self.device();
  note("aten::_copy_from", where.index());
  if (to.numel() == 0) return to;
  const c10::Stream stream = current_stream_of(where);
  ask(stream, [from = memory_of(self), to = memory_of(to)] {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  });
  if (!non_blocking && !is_empty(stream)) run_all();
  return to;
}

at::Tensor fake_copy_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return fake_copy(self, to, false);
}

int home_of(const torch::jit::Stack& stack) {
  for (const c10::IValue& value : stack) {
    if (value.isTensor() && value.toTensor().device().type() == kKind) {
      return value.toTensor().device().index();
    }
  }
  return -1;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  note(op.schema().name(), home_of(*stack));
  at::native::cpu_fallback(op, stack);
}

}  // namespace

at::Generator new_generator() {
  return at::make_generator<at::CPUGeneratorImpl>(1);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &fake_empty);
  m.impl("empty_strided", &fake_empty_strided);
  m.impl("resize_", &fake_resize);
  m.impl("_copy_from", &fake_copy);
  m.impl("_copy_from_and_resize", &fake_copy_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

}  // namespace smp::fake_device
