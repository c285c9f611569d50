#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>

#include "csrc/memory/copy_stream.h"

namespace smp::memory {

/// How far a device is with what hosts have asked of it. A host runs ahead, and
/// then waits for other ranks while its device still computes; the ranks would
/// look stuck although nothing is wrong. Thread-safe; nothing on the CPU, which
/// is done when it was asked.
class DeviceMeter {
 public:
  struct Options {
    /// A device that has reached no mark for so long hangs, perhaps in a
    /// collective that others never enter; no task takes as long.
    std::chrono::milliseconds longest_task{60'000};
  };

  explicit DeviceMeter(c10::Device device) : DeviceMeter(device, Options{}) {}
  DeviceMeter(c10::Device device, Options options)
      : device_(device), options_(options) {}

  /// At the end of a task, in its thread: marks what was asked of the current
  /// stream until now. @return the mark
  Mark mark();

  /// A number that grows with each mark that the device has reached, and with
  /// each look while it has not reached the last one, for up to `longest_task`.
  /// A source of progress for health::WaitRegistry; any thread.
  int64_t look();

 private:
  using Clock = std::chrono::steady_clock;

  void take_reached(Clock::time_point now);

  const c10::Device device_;
  const Options options_;
  std::mutex mutex_;
  std::deque<Mark> ahead_;  // not reached when somebody looked last
  Clock::time_point moved_at_;
  int64_t count_ = 0;
};

}  // namespace smp::memory
