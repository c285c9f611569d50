#include "tests/cpp/device/operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "tests/cpp/device/fallback.h"
#include "tests/cpp/device/memory.h"
#include "tests/cpp/device/streams.h"
#include "tests/cpp/device/twins.h"

namespace smp::late {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor late_empty(at::IntArrayRef sizes,
                      std::optional<at::ScalarType> dtype,
                      std::optional<at::Layout>,
                      std::optional<at::Device> where, std::optional<bool>,
                      std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_generic(sizes, &allocator(), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor late_empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                              std::optional<at::ScalarType> dtype,
                              std::optional<at::Layout>,
                              std::optional<at::Device> where,
                              std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& late_resize(const at::Tensor& self, at::IntArrayRef sizes,
                              std::optional<at::MemoryFormat> format) {
  const at::Tensor meta =
      at::detail::empty_meta(sizes, self.scalar_type(), std::nullopt,
                             std::nullopt, std::nullopt, format);
  resize_tensor(self, sizes, meta.strides());
  return self;
}

at::Tensor& late_set_storage(at::Tensor& self, at::Storage source,
                             int64_t offset, at::IntArrayRef sizes,
                             at::IntArrayRef strides) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.data() == nullptr) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  resize_tensor(self, self.sizes().vec(), self.strides().vec());
  return self;
}

at::Tensor& late_set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  at::Storage none(at::Storage::use_byte_size_t(), 0, allocator().allocate(0),
                   &allocator(), true);
  return late_set_storage(self, std::move(none), 0, {0}, {});
}

at::Scalar late_item(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  count_call("aten::_local_scalar_dense", "returns a number");
  drain(current_stream(self.device().index()));
  return at::_local_scalar_dense(Twins(c10::kCPU).of(self));
}

void late_record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr(), stream);
}

// Counts integers, too, as CUDA does and the CPU does not.
at::Tensor late_histc(const at::Tensor& self, int64_t bins,
                      const at::Scalar& min, const at::Scalar& max) {
  const c10::DeviceGuard guard(self.device());
  count_call("aten::histc", "late");
  const bool is_integral = at::isIntegralType(self.scalar_type(), false);
  const at::Tensor numbers = is_integral ? self.to(at::kFloat) : self;
  at::Tensor counts = at::empty({bins}, numbers.options());
  Twins twins(c10::kCPU);
  enqueue(current_stream(self.device().index()),
          [from = twins.of(numbers), to = twins.of(counts), bins, min,
           max]() mutable {
            const at::NoGradGuard no_grad;
            at::histc_out(to, from, bins, min, max);
          });
  return is_integral ? counts.to(self.scalar_type()) : counts;
}

// ------------------------------------------------------------------- copies

void queue_copy(const c10::Stream& stream, const at::Tensor& from,
                const at::Tensor& to) {
  enqueue(stream, [from, to] {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  });
}

void order(const c10::Stream& first, const c10::Stream& second) {
  if (first != second) wait_for(second, mark_end(first));
}

// Copies as CUDA does: on the stream of the source, in order with that of the
// target.
void copy_on_devices(const at::Tensor& self, const at::Tensor& to) {
  const c10::Stream stream = current_stream(self.device().index());
  const c10::Stream other = current_stream(to.device().index());
  order(other, stream);
  Twins twins(c10::kCPU);
  queue_copy(stream, twins.of(self), twins.of(to));
  order(stream, other);
}

// A tensor over the same memory of the host, which it does not keep.
at::Tensor unkept(const at::Tensor& tensor) {
  auto* begin = const_cast<void*>(tensor.storage().data());
  c10::Storage storage(c10::Storage::use_byte_size_t(),
                       tensor.storage().nbytes(),
                       c10::DataPtr(begin, begin, [](void*) {}, c10::kCPU));
  at::Tensor same = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      tensor.dtype());
  same.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return same;
}

void copy_from_host(const at::Tensor& self, const at::Tensor& to,
                    bool non_blocking) {
  const c10::Stream stream = current_stream(to.device().index());
  const at::Tensor target = Twins(c10::kCPU).of(to);
  if (!is_pinned(self.const_data_ptr())) {
    // CUDA copies pageable memory to a place of its own first.
    queue_copy(stream, self.clone(), target);
  } else {
    queue_copy(stream, unkept(self), target);
    record_pinned_use(self.const_data_ptr(), stream);
  }
  if (!non_blocking) drain(stream);
}

void copy_to_host(const at::Tensor& self, const at::Tensor& to,
                  bool non_blocking) {
  const c10::Stream stream = current_stream(self.device().index());
  const at::Tensor source = Twins(c10::kCPU).of(self);
  if (non_blocking && is_pinned(to.const_data_ptr()) && to.is_contiguous()) {
    queue_copy(stream, source, unkept(to));
    record_pinned_use(to.const_data_ptr(), stream);
    return;
  }
  queue_copy(stream, source, to);
  drain(stream);
}

at::Tensor late_copy(const at::Tensor& self, const at::Tensor& to,
                     bool non_blocking) {
  const bool is_source = self.device().type() == kType;
  const bool is_target = to.device().type() == kType;
  const c10::DeviceGuard guard(is_source ? self.device() : to.device());
  const bool is_pageable_upload =
      !is_source && !is_pinned(self.const_data_ptr());
  count_call("aten::_copy_from", is_source && is_target ? "late"
                                 : non_blocking && is_pageable_upload
                                     ? "late, source copied"
                                 : non_blocking ? "late if pinned"
                                                : "drains");
  if (to.numel() == 0) return to;
  if (is_source && is_target) {
    copy_on_devices(self, to);
  } else if (is_target) {
    copy_from_host(self, to, non_blocking);
  } else {
    copy_to_host(self, to, non_blocking);
  }
  return to;
}

at::Tensor late_copy_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return late_copy(self, to, false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &late_empty);
  m.impl("empty_strided", &late_empty_strided);
  m.impl("resize_", &late_resize);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &late_set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &late_set_nothing);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("_local_scalar_dense", &late_item);
  m.impl("record_stream", &late_record_stream);
  m.impl("histc", &late_histc);
  m.impl("_copy_from", &late_copy);
  m.impl("_copy_from_and_resize", &late_copy_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

void resize_storage(c10::StorageImpl& storage, size_t num_bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = allocator().allocate(num_bytes);
  const size_t kept = std::min(num_bytes, storage.nbytes());
  if (kept > 0) {
    enqueue(current_stream(storage.device().index()),
            [to = touchable(data.get()), from = touchable(storage.data()),
             kept] { std::memcpy(to, from, kept); });
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(num_bytes);
}

void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes,
                   at::IntArrayRef strides) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides);
  const size_t needed = at::detail::computeStorageNbytes(
      sizes, strides, tensor.itemsize(), tensor.storage_offset());
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) resize_storage(*storage, needed);
}

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides,
                      at::ScalarType dtype, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys,
                                           dtype);
}

}  // namespace smp::late
