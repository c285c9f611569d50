#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>

#include "csrc/memory/copy_stream.h"

namespace smp::memory {

/// Measures how far a device is with the work of its host. A host runs ahead,
/// and then waits for other ranks while its device still computes; the ranks
/// would look stuck although nothing is wrong. Thread-safe. Does nothing on the
/// CPU, which does its work at once.
class DeviceMeter {
 public:
  struct Options {
    /// Time without a reached mark after which a device hangs, perhaps in a
    /// collective that other ranks never enter; no task takes as long.
    std::chrono::milliseconds longest_task{60'000};
  };

  explicit DeviceMeter(c10::Device device) : DeviceMeter(device, Options{}) {}
  DeviceMeter(c10::Device device, Options options)
      : device_(device), options_(options) {}

  /// Marks the work of the current stream so far, at the end of a task, in its
  /// thread. @return the mark
  Mark mark();

  /// Returns a number that grows with each mark that the device has reached,
  /// and with each read while it has not reached the last one, for up to
  /// `longest_task`. A source of progress for health::WaitRegistry; any thread
  /// may call.
  int64_t read();

 private:
  using Clock = std::chrono::steady_clock;

  void take_reached(Clock::time_point now);

  const c10::Device device_;
  const Options options_;
  std::mutex mutex_;
  std::deque<Mark> ahead_;  // not reached at the last read
  Clock::time_point moved_at_;
  int64_t count_ = 0;
};

}  // namespace smp::memory
