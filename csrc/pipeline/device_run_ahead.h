#pragma once

#include <c10/core/Device.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "csrc/memory/device_meter.h"

namespace smp::pipeline {

/// Counts the tasks that a rank has asked its device for and that the device
/// has not done. A host may ask for more while the device works on one task and
/// has another one behind it: more would leave the policy nothing to choose
/// from, fewer would let the device run dry. Thread-safe. Never full on the
/// CPU, which is done when it was asked.
class DeviceRunAhead {
 public:
  /// @param meter  gets all marks; null: nothing is ever ahead
  /// @param go_on  see `call_when_free`
  DeviceRunAhead(c10::Device device, std::shared_ptr<memory::DeviceMeter> meter,
                 std::function<void()> go_on);
  ~DeviceRunAhead();

  /// Begins a turn. Its work is a task of its own, or a part of the task
  /// before.
  /// @return whether something was held back since the turn before
  bool begin_turn(bool begins_task);
  /// Marks the work asked for until now; called in the thread of a turn.
  void mark();

  /// Returns whether the device has not come to the last task asked for.
  bool is_full();
  /// Notes that something is held back. A thread of this object that holds no
  /// lock calls `go_on` once the device has room.
  void call_when_free();

 private:
  bool is_full_locked();
  void watch();

  const c10::Device device_;
  const std::shared_ptr<memory::DeviceMeter> meter_;  // null on the CPU
  const std::function<void()> go_on_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<memory::Mark> ahead_;  // ends of tasks
  bool begins_task_ = false;        // with the next mark
  bool holds_back_ = false;
  bool is_asked_ = false;  // `go_on_` is to be called
  bool stopping_ = false;
  std::thread thread_;  // started when the device is first full
};

}  // namespace smp::pipeline
