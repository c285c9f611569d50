#include "csrc/pipeline/device_run_ahead.h"

#include <c10/core/DeviceGuard.h>

#include <chrono>
#include <exception>
#include <utility>

#include "csrc/health/thread_name.h"
#include "csrc/memory/device_scope.h"

namespace smp::pipeline {
namespace {

// One task on which the device works, and one behind it.
constexpr size_t kMostTasksAhead = 2;
// A queued task keeps the device busy between two questions.
constexpr std::chrono::microseconds kAskDeviceEvery{50};

}  // namespace

DeviceRunAhead::DeviceRunAhead(c10::Device device,
                               std::shared_ptr<memory::DeviceMeter> meter,
                               std::function<void()> go_on)
    : device_(device),
      meter_(device.is_cpu() ? nullptr : std::move(meter)),
      go_on_(std::move(go_on)) {}

DeviceRunAhead::~DeviceRunAhead() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool DeviceRunAhead::begin_turn(bool begins_task) {
  if (!meter_) return false;
  const std::lock_guard lock(mutex_);
  begins_task_ = begins_task;
  return std::exchange(holds_back_, false);
}

void DeviceRunAhead::mark() {
  if (!meter_) return;
  memory::Mark mark = meter_->mark();
  const std::lock_guard lock(mutex_);
  // Further work of the same task moves the end of that task.
  if (std::exchange(begins_task_, false) || ahead_.empty()) {
    ahead_.push_back(std::move(mark));
  } else {
    ahead_.back() = std::move(mark);
  }
}

bool DeviceRunAhead::is_full() {
  if (!meter_) return false;
  const std::lock_guard lock(mutex_);
  return is_full_locked();
}

bool DeviceRunAhead::is_full_locked() {
  if (ahead_.size() < kMostTasksAhead) return false;
  // A question on another device would open a context there.
  const c10::DeviceGuard guard(device_);
  try {
    while (!ahead_.empty() && ahead_.front().is_over()) ahead_.pop_front();
  } catch (const std::exception&) {
    // The device has failed. The thread that uses it next raises that.
    ahead_.clear();
  }
  return ahead_.size() >= kMostTasksAhead;
}

void DeviceRunAhead::call_when_free() {
  if (!meter_) return;
  const std::lock_guard lock(mutex_);
  holds_back_ = is_asked_ = true;
  if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
  changed_.notify_all();
}

void DeviceRunAhead::watch() {
  health::name_this_thread("smp-run-ahead");
  memory::enter_device(device_);
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (!is_asked_) {
      changed_.wait(lock);
    } else if (is_full_locked()) {
      changed_.wait_for(lock, kAskDeviceEvery);
    } else {
      is_asked_ = false;
      lock.unlock();
      go_on_();
      lock.lock();
    }
  }
}

}  // namespace smp::pipeline
