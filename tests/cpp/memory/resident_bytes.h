#pragma once

#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace smp::memory {

/// Bytes of this process that are in physical memory.
inline int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  statm >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

inline constexpr int64_t kMiB = int64_t{1} << 20;

}  // namespace smp::memory
