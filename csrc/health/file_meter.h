#pragma once

#include <cstdint>
#include <functional>

namespace smp::health {

/// How many bytes this process, and children that it has waited for, have read
/// from files and written to them, pipes included. A rank that prepares data
/// while others wait moves, though it says nothing to anybody.
class FileMeter {
 public:
  /// Looks, and returns what was counted so far. What is less than a transfer
  /// between two looks is talk, such as the lines of a log. One thread.
  int64_t look();
  /// What this process reads and writes during `work` does not count.
  void leave_out(const std::function<void()>& work);

 private:
  int64_t seen_ = -1;
  int64_t num_bytes_ = 0;
};

}  // namespace smp::health
