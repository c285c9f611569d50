#pragma once

#include <cstdint>
#include <functional>

namespace smp::health {

/// Counts bytes that this process, and children it has waited for, have read
/// from and written to files, pipes included. A rank that prepares data while
/// others wait makes progress, though it sends no messages.
class FileMeter {
 public:
  /// Reads the counters and returns the bytes counted so far. Ignores a small
  /// change between two calls, such as lines of a log. Used by one thread.
  int64_t read();
  /// Runs `work` without counting the bytes it reads and writes.
  void leave_out(const std::function<void()>& work);

 private:
  int64_t seen_ = -1;
  int64_t num_bytes_ = 0;
};

}  // namespace smp::health
