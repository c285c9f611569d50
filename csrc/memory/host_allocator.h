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
// The heap of the C library keeps freed blocks of up to 32 MB for later ones.
// Each small object that is made meanwhile takes the begin of the smallest hole
// it fits into, for which the next large block is too large then; so weights
// and gradients that come and go among objects that stay wander, leave holes
// of their size behind, and in the end a process has twice the memory of its
// state. Larger blocks come from the system each time, page by page, which
// takes longer than to compute many of them. Hence tensors from a huge page on
// are kept out of the heap, as PyTorch does on GPUs: memory is used again by
// tensors of the same size class. It never is more than what was in use at one
// time, but for what rounding to classes adds, and what is not used in two
// steps goes back to the system.

/// PyTorch's allocator of CPU tensors, in this process, for large ones; small
/// ones are made as before. Thread-safe, and safe to fork.
class HostAllocator final : public c10::Allocator {
 public:
  struct Stats {
    int64_t num_mapped = 0;    ///< blocks that came from the system, so far
    int64_t num_reused = 0;    ///< those that came from here
    int64_t live_bytes = 0;    ///< of large tensors
    int64_t cached_bytes = 0;  ///< of nobody, for later ones
    /// The last time that there was no memory: how often so far, what was asked
    /// for, and what was in use then. Later nobody knows: what failed is freed.
    int64_t num_failures = 0;
    int64_t failed_bytes = 0;
    int64_t live_at_failure_bytes = 0;
  };

  /// The one of this process; lives as long as it.
  SMP_EXPORT static HostAllocator& instance();

  /// From here on PyTorch uses it. May be called again.
  void install();
  /// As it was before; blocks that are in use stay valid.
  void uninstall();

  at::DataPtr allocate(size_t num_bytes) override;
  at::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t count) const override;

  /// Memory that nobody has used since the call before the last one goes back.
  /// Call it once in a while, as after each update.
  void release_idle();
  /// All that nobody uses goes back, and what the heap has of whole pages: for
  /// moments when much has been freed for good.
  void release_all();

  Stats stats() const;

  /// Large tensors find no memory beyond so much; 0: no limit. For tests.
  void set_limit(int64_t num_bytes) { limit_bytes_ = num_bytes; }

 private:
  // Free blocks of one size.
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
