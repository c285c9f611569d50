#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

// Memory of the late device. It is mapped twice: tensors have addresses that
// the host must not touch, and the threads of streams use the other ones.

namespace smp::late {

/// Returns the allocator of device memory. As CUDA's, it keeps freed blocks for
/// the stream that allocated them, which may have them again at once; before
/// that, this stream fills them with 0xFF (NaN, -1).
c10::Allocator& allocator();
/// Keeps a block from reuse, once it is freed, until a stream has done what is
/// queued by then.
void record_use(const c10::DataPtr& data, const c10::Stream& stream);

/// Returns the address at which threads of streams use device memory.
void* touchable(const void* address);
/// Returns the device of an address, or -1 if it is not device memory.
int device_of(const void* address);

struct MemoryStats {
  int64_t allocated_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t reserved_bytes = 0;  ///< with free blocks
  int64_t total_bytes = 0;     ///< by SMP_LATE_MEMORY_MB (4096)
};
MemoryStats memory_stats(c10::DeviceIndex index);
void reset_peak(c10::DeviceIndex index);
/// Waits for all streams and returns free blocks to the device.
void empty_cache();

/// Explains an access of the host to device memory before the process dies.
/// Call it after faulthandler, whose traceback then follows.
void explain_faults();

/// Returns the allocator of pinned memory of the host. A freed block is filled
/// with 0xFF once the streams that copy from or to it have done so.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);
/// Keeps a pinned block until a stream has done what is queued so far.
void record_pinned_use(const void* address, const c10::Stream& stream);

}  // namespace smp::late
