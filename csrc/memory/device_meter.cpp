#include "csrc/memory/device_meter.h"

#include <c10/core/DeviceGuard.h>

#include <exception>

#include "csrc/memory/device_scope.h"

namespace smp::memory {
namespace {

// Most marks that are kept: only whether any is reached matters.
constexpr size_t kMostAhead = 256;

}  // namespace

Mark DeviceMeter::mark() {
  const auto stream = current_stream(device_);
  if (!stream) return Mark::none();
  const std::lock_guard lock(mutex_);
  if (ahead_.size() >= kMostAhead) take_reached(Clock::now());
  Mark mark = Mark::record(*stream);
  if (ahead_.size() >= kMostAhead) return mark;
  if (ahead_.empty()) moved_at_ = Clock::now();
  ahead_.push_back(mark);
  return mark;
}

int64_t DeviceMeter::read() {
  const std::lock_guard lock(mutex_);
  const Clock::time_point now = Clock::now();
  take_reached(now);
  const bool is_busy = !ahead_.empty();
  if (is_busy && now - moved_at_ < options_.longest_task) ++count_;
  return count_;
}

void DeviceMeter::take_reached(Clock::time_point now) {
  if (ahead_.empty()) return;
  // A query on another device would open a context there.
  const c10::DeviceGuard guard(device_);
  try {
    while (!ahead_.empty() && ahead_.front().is_over()) {
      ahead_.pop_front();
      ++count_;
      moved_at_ = now;
    }
  } catch (const std::exception&) {
    // The device has failed. The thread that uses it raises that, with a better
    // reason; here it means that there is no progress.
    ahead_.clear();
  }
}

}  // namespace smp::memory
