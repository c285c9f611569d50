#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tests/cpp/cuda_runtime/torch_device.h"
#include "tests/cpp/cuda_runtime/torch_state.h"

// Operators for tensors of the stand-in's devices.

namespace smp::fake_cuda {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> where,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_generic(sizes, c10::GetAllocator(kTorchType), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>,
                         std::optional<at::Device> where, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_strided_generic(sizes, strides,
                                           c10::GetAllocator(kTorchType), kKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat>) {
  const c10::DeviceGuard guard(self.device());
  const auto needed =
      static_cast<size_t>(c10::multiply_integers(sizes)) * self.itemsize();
  c10::StorageImpl* const storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) {
    storage->set_data_ptr_noswap(
        c10::GetAllocator(kTorchType)->allocate(needed));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

// The tensor for a kernel, without a share in its memory.
std::function<at::Tensor()> seen_by_kernels(const at::Tensor& tensor) {
  return [data = tensor.const_data_ptr(), sizes = tensor.sizes().vec(),
          strides = tensor.strides().vec(), dtype = tensor.scalar_type()] {
    return at::from_blob(view(data), sizes, strides, at::TensorOptions(dtype));
  };
}

void ask_for_bytes(const at::Tensor& from, const at::Tensor& to,
                   cudaMemcpyKind kind, bool is_async) {
  const at::Device device = to.is_cpu() ? from.device() : to.device();
  const c10::DeviceGuard guard(device);
  cudaStream_t const stream = native_of(torch_current_stream(device.index()));
  check(cudaMemcpyAsync(to.mutable_data_ptr(), from.const_data_ptr(),
                        from.nbytes(), kind, stream));
  if (!is_async) check(cudaStreamSynchronize(stream));
}

bool is_plain_copy(const at::Tensor& from, const at::Tensor& to) {
  return from.scalar_type() == to.scalar_type() && from.is_contiguous() &&
         to.is_contiguous();
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  if (is_plain_copy(from, to)) {
    ask_for_bytes(from, to, cudaMemcpyDeviceToDevice, true);
    return;
  }
  const c10::DeviceGuard guard(to.device());
  check(launch(native_of(torch_current_stream(to.device().index())),
               [source = seen_by_kernels(from), target = seen_by_kernels(to)] {
                 const at::NoGradGuard no_grad;
                 target().copy_(source());
               }));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to,
                     bool is_async) {
  if (to.numel() == 0) return to;
  const at::Tensor source = from.expand(to.sizes());
  if (!source.is_cpu() && !to.is_cpu()) {
    copy_on_device(source, to);
  } else if (to.is_cpu()) {
    const at::Tensor packed = source.contiguous();
    if (is_plain_copy(packed, to)) {
      ask_for_bytes(packed, to, cudaMemcpyDeviceToHost, is_async);
    } else {
      const at::Tensor host = at::empty(packed.sizes(), packed.scalar_type());
      ask_for_bytes(packed, host, cudaMemcpyDeviceToHost, false);
      to.copy_(host);
    }
  } else {
    const at::Tensor packed = source.to(to.scalar_type()).contiguous();
    if (to.is_contiguous()) {
      ask_for_bytes(packed, to, cudaMemcpyHostToDevice, is_async);
    } else {
      const at::Tensor here = at::empty(to.sizes(), to.options());
      ask_for_bytes(packed, here, cudaMemcpyHostToDevice, false);
      copy_on_device(here, to);
    }
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

}  // namespace smp::fake_cuda
