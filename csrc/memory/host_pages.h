#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

namespace smp::memory {

/// From this many bytes on memory is worth pages of its own: a huge page.
inline constexpr int64_t kOwnPagesBytes = int64_t{2} << 20;

/// Memory of the host that the system gets back as soon as it is freed.
///
/// The C library keeps freed blocks of up to 32 MB for later ones, and cannot
/// give back what lies below a block that stays. So large memory that comes and
/// goes in each step would leave holes between what stays, and a process would
/// have twice the memory of its state. Pages are huge ones where the system has
/// them, because most of the cost of new memory is per page.
/// @return `num_bytes` > 0 bytes of zeros, aligned to a page
/// @throws Error when the system has none
at::DataPtr take_pages(int64_t num_bytes);

/// A tensor of one dim with any content: in pages of its own on the host from
/// `kOwnPagesBytes` on, else as `at::empty` makes it.
at::Tensor empty_in_pages(int64_t numel, const at::TensorOptions& options);

/// Lets the C library give back all pages of the host that are wholly free. For
/// moments when much has been freed for good: the next allocations are slower.
void trim_heap();

}  // namespace smp::memory
