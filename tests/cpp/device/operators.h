#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>

namespace smp::late {

/// Gives a storage another size, and queues a copy of what it has.
void resize_storage(c10::StorageImpl& storage, size_t num_bytes);
/// Gives a tensor another size, as `resize_`; strides are given.
void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes,
                   at::IntArrayRef strides);
at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides,
                      at::ScalarType dtype, c10::Device device);

}  // namespace smp::late
