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

/// How many tasks a rank has asked its device for that the device has not done.
/// A host may ask for more while the device works on one and has another one
/// behind it: more would leave the policy nothing to choose from, fewer would
/// let the device run dry. Thread-safe; knows nothing of the CPU, which is done
/// when it was asked.
class DeviceRunAhead {
 public:
  /// @param meter  gets all marks; null: nothing is ever ahead
  /// @param go_on  see `call_when_free`
  DeviceRunAhead(c10::Device device, std::shared_ptr<memory::DeviceMeter> meter,
                 std::function<void()> go_on);
  ~DeviceRunAhead();

  /// A turn begins. What it asks for is a task of its own, or a part of the one
  /// before it.
  /// @return whether something was held back since the turn before
  bool begin_turn(bool begins_task);
  /// In the thread of a turn: marks what it has asked for until now.
  void mark();

  /// Whether the device has not come to the last task that was asked for.
  bool is_full();
  /// Something is held back: `go_on` is called once the device has room, by a
  /// thread of this object that holds no lock.
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
  bool is_asked_ = false;  // to call `go_on_`
  bool stopping_ = false;
  std::thread thread_;  // from the first time on that the device is full
};

}  // namespace smp::pipeline
