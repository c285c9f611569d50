#include "csrc/memory/host_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <pthread.h>

#include <algorithm>

#include "csrc/common/check.h"
#include "csrc/memory/host_pages.h"
#include "csrc/memory/host_pool.h"

namespace smp::memory {

HostAllocator& HostAllocator::instance() {
  static auto* const allocator =
      new HostAllocator();  // tensors may live longer
  return *allocator;
}

HostAllocator::HostAllocator() : below_(c10::GetCPUAllocator()) {
  // A child must not start with a mutex that another thread has locked.
  ::pthread_atfork([] { instance().mutex_.lock(); },
                   [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
}

void HostAllocator::install() {
  if (is_installed_) return;
  c10::SetCPUAllocator(this);
  is_installed_ = c10::GetCPUAllocator() == this;
}

void HostAllocator::uninstall() {
  if (!is_installed_) return;
  is_installed_ = false;
  if (c10::GetCPUAllocator() == this) c10::SetCPUAllocator(below_);
  release_all();
}

at::DataPtr HostAllocator::allocate(size_t num_bytes) {
  if (num_bytes < static_cast<size_t>(kOwnPagesBytes)) {
    return below_->allocate(num_bytes);
  }
  const int64_t size = HostPool::size_class(static_cast<int64_t>(num_bytes));
  void* const block = take(size);
  c10::reportMemoryUsageToProfiler(block, size, 0, 0, at::Device(at::kCPU));
  return {block, block, &HostAllocator::free, at::Device(at::kCPU)};
}

at::DeleterFnPtr HostAllocator::raw_deleter() const {
  return &HostAllocator::free;
}

void HostAllocator::copy_data(void* to, const void* from, size_t count) const {
  default_copy_data(to, from, count);
}

void HostAllocator::free(void* block) { instance().give(block); }

void* HostAllocator::take(int64_t size) {
  Blocks unneeded;
  {
    const std::lock_guard lock(mutex_);
    Shelf& shelf = shelves_[size];
    if (!shelf.blocks.empty()) {
      void* const block = shelf.blocks.back();
      shelf.blocks.pop_back();
      shelf.fewest = std::min(shelf.fewest, shelf.blocks.size());
      sizes_.emplace(block, size);
      ++stats_.num_reused;
      stats_.live_bytes += size;
      stats_.cached_bytes -= size;
      return block;
    }
    // The same number of bytes of other sizes is freed first: the total stays
    // within what was in use.
    int64_t missing = size;
    for (auto it = shelves_.rbegin(); it != shelves_.rend(); ++it) {
      while (missing > 0 && !it->second.blocks.empty()) {
        take_oldest(it->second, it->first, unneeded);
        missing -= it->first;
      }
    }
  }
  unmap(unneeded);
  void* const block = map_or_note(size);
  const std::lock_guard lock(mutex_);
  sizes_.emplace(block, size);
  ++stats_.num_mapped;
  stats_.live_bytes += size;
  return block;
}

void* HostAllocator::map_or_note(int64_t size) {
  try {
    const int64_t limit = limit_bytes_;
    SMP_CHECK(limit == 0 || stats().live_bytes + size <= limit, "expected ",
              size, " bytes of host memory, and the limit has no more");
    return map_pages(size);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    ++stats_.num_failures;
    stats_.failed_bytes = size;
    stats_.live_at_failure_bytes = stats_.live_bytes;
    throw;
  }
}

void HostAllocator::give(void* block) {
  int64_t size = 0;
  bool is_kept = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(block);
    if (found != sizes_.end()) {
      size = found->second;
      sizes_.erase(found);
      stats_.live_bytes -= size;
      is_kept = is_installed_;  // otherwise it would stay unused
      if (is_kept) {
        shelves_[size].blocks.push_back(block);
        stats_.cached_bytes += size;
      }
    }
  }
  if (size == 0) {
    below_->raw_deallocate(block);  // from a caller's raw_allocate
    return;
  }
  c10::reportMemoryUsageToProfiler(block, -size, 0, 0, at::Device(at::kCPU));
  if (!is_kept) unmap({{block, size}});
}

void HostAllocator::take_oldest(Shelf& shelf, int64_t size, Blocks& into) {
  into.emplace_back(shelf.blocks.front(), size);
  shelf.blocks.pop_front();
  shelf.fewest = std::min(shelf.fewest, shelf.blocks.size());
  stats_.cached_bytes -= size;
}

void HostAllocator::unmap(const Blocks& blocks) {
  for (const auto& [block, size] : blocks) unmap_pages(block, size);
}

void HostAllocator::release_idle() {
  Blocks idle;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [size, shelf] : shelves_) {
      const size_t unused = std::min(shelf.fewest, shelf.fewest_before);
      shelf.fewest_before = shelf.fewest - unused;
      for (size_t i = 0; i < unused; ++i) take_oldest(shelf, size, idle);
      shelf.fewest = shelf.blocks.size();
    }
  }
  unmap(idle);
}

void HostAllocator::release_all() {
  Blocks free_blocks;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [size, shelf] : shelves_) {
      while (!shelf.blocks.empty()) take_oldest(shelf, size, free_blocks);
    }
  }
  unmap(free_blocks);
#if defined(__GLIBC__)
  ::malloc_trim(0);
#endif
}

HostAllocator::Stats HostAllocator::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace smp::memory
