#include "csrc/memory/device_clock.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/monotonic_clock.h"

namespace smp::memory {

// The base event of a period has a time, unlike the events of marks.
struct DeviceClock::Period {
  std::optional<c10::Event> base;
  // Bounds of what the host's clock showed at `base`.
  int64_t earliest_ns = std::numeric_limits<int64_t>::min();
  int64_t latest_ns = std::numeric_limits<int64_t>::max();
};

class DeviceClock::Point {
 public:
  explicit Point(std::shared_ptr<Period> its_period)
      : period(std::move(its_period)) {}

  std::optional<c10::Event> event;  // none once it was read, or is the base
  const std::shared_ptr<Period> period;
  int64_t asked_ns = 0;
  int64_t seen_ns = 0;  // 0: not yet
  int64_t since_base_ns = 0;

  const c10::Event& at() const { return event ? *event : *period->base; }
};

DeviceClock::DeviceClock(c10::Device device) : device_(device) {}

DeviceClock::~DeviceClock() = default;

void DeviceClock::begin_period(const c10::Stream& stream) {
  // A query on another device would open a context there.
  const c10::DeviceGuard guard(device_);
  const std::lock_guard lock(mutex_);
  look_locked();
  // Points that have come are read now and freed before the recording ends.
  for (; num_seen_ > 0; --num_seen_) {
    read_locked(*unread_.front());
    unread_.pop_front();
  }
  period_ = std::make_shared<Period>();
  auto first = std::make_shared<Point>(period_);
  period_->base.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  first->asked_ns = monotonic_ns();
  period_->base->record(stream);
  unread_.push_back(std::move(first));
}

DeviceClock::PointPtr DeviceClock::point(const c10::Stream& stream) {
  const c10::DeviceGuard guard(device_);
  const std::lock_guard lock(mutex_);
  if (!period_) return nullptr;
  look_locked();
  auto point = std::make_shared<Point>(period_);
  point->event.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  point->asked_ns = monotonic_ns();
  point->event->record(stream);
  unread_.push_back(point);
  return point;
}

// Notes which points have come. With several streams, one may hold up the
// others, which only makes bounds wider.
void DeviceClock::look_locked() {
  while (num_seen_ < unread_.size()) {
    Point& next = *unread_[num_seen_];
    if (!next.at().query()) return;
    next.seen_ns = monotonic_ns();
    ++num_seen_;
  }
}

void DeviceClock::read_locked(Point& point) {
  Period& period = *point.period;
  if (point.event) {
    const double ms = period.base->elapsedTime(*point.event);
    point.since_base_ns = std::llround(ms * 1e6);
    point.event.reset();
  }
  period.earliest_ns =
      std::max(period.earliest_ns, point.asked_ns - point.since_base_ns);
  period.latest_ns =
      std::min(period.latest_ns, point.seen_ns - point.since_base_ns);
}

void DeviceClock::settle() {
  const c10::DeviceGuard guard(device_);
  const std::lock_guard lock(mutex_);
  look_locked();
  while (!unread_.empty()) {
    Point& point = *unread_.front();
    if (point.seen_ns == 0) {
      point.at().synchronize();
      point.seen_ns = monotonic_ns();
    }
    read_locked(point);
    unread_.pop_front();
  }
  num_seen_ = 0;
}

DeviceClock::Time DeviceClock::time_of(const Point& point) const {
  const std::lock_guard lock(mutex_);
  const Period& period = *point.period;
  SMP_ASSERT(!point.event, "a point in a device's work was not read");
  const int64_t distance = period.latest_ns - period.earliest_ns;
  return {period.earliest_ns + distance / 2 + point.since_base_ns,
          // Clocks that drift within a period may swap the bounds.
          (std::abs(distance) + 1) / 2};
}

}  // namespace smp::memory
