#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

namespace smp::memory {

/// From this many bytes on memory is worth pages of its own: a huge page.
inline constexpr int64_t kOwnPagesBytes = int64_t{2} << 20;

/// Memory of the host that comes from the system, and goes back there at once.
/// Its pages are huge ones where the system has them, because most of the cost
/// of new memory is per page.
/// @return `num_bytes` > 0 bytes of zeros, aligned to a page
/// @throws Error when the system has none
void* map_pages(int64_t num_bytes);
/// @param num_bytes  as it was mapped
void unmap_pages(void* begin, int64_t num_bytes);

/// Mapped pages, with their owner.
at::DataPtr take_pages(int64_t num_bytes);

/// A tensor of one dim with any content: in pages of its own on the host from
/// `kOwnPagesBytes` on, else as `at::empty` makes it. For what comes and goes
/// in each step, and is not to be there in between.
at::Tensor empty_in_pages(int64_t numel, const at::TensorOptions& options);

}  // namespace smp::memory
