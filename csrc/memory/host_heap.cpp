#include "csrc/memory/host_heap.h"

#include <malloc.h>

#include <mutex>

#include "csrc/common/env.h"

namespace smp::memory {

void trim_heap() {
#if defined(__GLIBC__)
  ::malloc_trim(0);
#endif
}

namespace {

constexpr int kMiB = 1 << 20;

std::mutex mutex;
int num_alive = 0;

bool has_own_settings() {
  for (const char* name :
       {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}) {
    if (env_string(name)) return true;
  }
  return false;
}

void set_thresholds([[maybe_unused]] int mapped_from_bytes) {
#if defined(__GLIBC__)
  if (has_own_settings()) return;
  ::mallopt(M_MMAP_THRESHOLD, mapped_from_bytes);
  ::mallopt(M_TRIM_THRESHOLD, 64 * kMiB);
#endif
}

}  // namespace

MappedBlocks::MappedBlocks() {
  const std::lock_guard lock(mutex);
  if (num_alive++ == 0) set_thresholds(kMiB);
}

MappedBlocks::~MappedBlocks() {
  const std::lock_guard lock(mutex);
  if (--num_alive == 0) set_thresholds(32 * kMiB);
}

}  // namespace smp::memory
