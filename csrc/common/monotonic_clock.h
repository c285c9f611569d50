#pragma once

#include <chrono>
#include <cstdint>

namespace smp {

/// Returns nanoseconds of the machine's monotonic clock, equal in all its
/// processes.
inline int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace smp
