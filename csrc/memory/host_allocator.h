#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/common/check.h"

namespace smp::memory {

// Note [Memory of the host]
//
// The heap of the C library keeps freed blocks of up to 32 MB for later ones. A
// small object made meanwhile takes the start of the smallest hole it fits
// into, and the next large block no longer fits there. Weights and gradients
// that come and go among objects that stay therefore wander, and leave holes of
// their size. In the end a process has twice the memory of its state. Larger
// blocks come from the system each time, page by page, which takes longer than
// to compute many of them. Hence tensors of at least a huge page are kept out
// of the heap, as PyTorch does on GPUs: their memory is reused by tensors of
// the same size class. The total never exceeds the most that was in use at one
// time, except for rounding to classes. Memory that is unused for two steps is
// returned to the system.

/// Replaces PyTorch's allocator of CPU tensors in this process, for large ones;
/// small ones are made as before. Thread-safe, and safe to fork.
class HostAllocator final : public c10::Allocator {
 public:
  struct Stats {
    int64_t num_mapped = 0;    ///< blocks that came from the system, so far
    int64_t num_reused = 0;    ///< blocks reused from here
    int64_t live_bytes = 0;    ///< bytes of large tensors
    int64_t cached_bytes = 0;  ///< free bytes, for later tensors
    /// Failures so far; the next two are of the last one: bytes asked for, and
    /// bytes in use then. They are stored because the failed tensors are freed.
    int64_t num_failures = 0;
    int64_t failed_bytes = 0;
    int64_t live_at_failure_bytes = 0;
  };

  /// Returns the allocator of this process, which lives as long as the process.
  SMP_EXPORT static HostAllocator& instance();

  /// Makes PyTorch use it from now on. May be called again.
  void install();
  /// Restores the previous allocator; blocks that are in use stay valid.
  void uninstall();

  at::DataPtr allocate(size_t num_bytes) override;
  at::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t count) const override;

  /// Returns memory to the system that was unused since the call before the
  /// last one. Call it regularly, for instance after each update.
  void release_idle();
  /// Returns all unused memory to the system, and whole free pages of the heap.
  /// Useful when much has been freed for good.
  void release_all();

  Stats stats() const;

  /// Sets the most bytes of large tensors; 0: no limit. For tests.
  void set_limit(int64_t num_bytes) { limit_bytes_ = num_bytes; }

 private:
  // The free blocks of one size.
  struct Shelf {
    std::deque<void*> blocks;  // the last one was used last
    size_t fewest = 0;         // since the last `release_idle`
    size_t fewest_before = 0;  // between the two before
  };
  using Block = std::pair<void*, int64_t>;
  using Blocks = std::vector<Block>;

  HostAllocator();
  static void free(void* block);
  void* take(int64_t size);
  void* map_or_note(int64_t size);
  void give(void* block);
  void take_oldest(Shelf& shelf, int64_t size, Blocks& into);
  static void unmap(const Blocks& blocks);

  c10::Allocator* const below_;
  std::atomic<bool> is_installed_ = false;
  std::atomic<int64_t> limit_bytes_ = 0;
  mutable std::mutex mutex_;                  // guards all that follows
  std::unordered_map<void*, int64_t> sizes_;  // of blocks in use
  std::map<int64_t, Shelf> shelves_;          // by size
  Stats stats_;
};

}  // namespace smp::memory
