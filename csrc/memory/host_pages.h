#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

namespace smp::memory {

/// Least size of memory with pages of its own: a huge page.
inline constexpr int64_t kOwnPagesBytes = int64_t{2} << 20;

/// Maps memory of the host from the system; `unmap_pages` returns it at once.
/// Uses huge pages if the system has them, because most of the cost of new
/// memory is per page.
/// @return `num_bytes` > 0 bytes of zeros, aligned to a page
/// @throws Error when the system has none
void* map_pages(int64_t num_bytes);
/// @param num_bytes  size with which it was mapped
void unmap_pages(void* begin, int64_t num_bytes);

/// Returns mapped pages, with their owner.
at::DataPtr take_pages(int64_t num_bytes);

/// Returns a tensor of one dim with any content: in pages of its own on the
/// host from `kOwnPagesBytes` on, otherwise as `at::empty` makes it. For
/// tensors that come and go in each step, and use no memory in between.
at::Tensor empty_in_pages(int64_t numel, const at::TensorOptions& options);

/// Returns a tensor of one dim with zeros, in memory as `empty_in_pages` uses
/// it. On the host the system gives it large memory on the first write.
at::Tensor zeros_in_pages(int64_t numel, const at::TensorOptions& options);

}  // namespace smp::memory
