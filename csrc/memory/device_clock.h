#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

namespace smp::memory {

/// When a device came to points in its work, on the clock of the host, for
/// people to look at: no thread waits for a point before `settle`.
///
/// Devices have clocks of their own, and tell only how far two points are
/// apart. Each period (a step) has one offset between both clocks. A point
/// comes after the host asked for it, and before the host saw that it had come;
/// so each one bounds the offset from both sides, and the tightest bounds
/// count. Their middle is taken, and half of their distance is how wrong it may
/// be. Thread-safe.
class DeviceClock {
 public:
  class Point;
  using PointPtr = std::shared_ptr<Point>;

  /// On the clock of `monotonic_ns`, at most so much earlier or later.
  struct Time {
    int64_t ns = 0;
    int64_t uncertainty_ns = 0;
  };

  explicit DeviceClock(c10::Device device);
  ~DeviceClock();

  /// What follows is compared with the end of what `stream` has to do now.
  void begin_period(const c10::Stream& stream);
  /// The end of what was asked of `stream` so far; null before the first
  /// period.
  PointPtr point(const c10::Stream& stream);

  /// Waits until the device has come to all points.
  void settle();
  /// Of a point, after `settle`.
  Time time_of(const Point& point) const;

 private:
  struct Period;

  void look_locked();
  void read_locked(Point& point);

  const c10::Device device_;
  mutable std::mutex mutex_;
  std::shared_ptr<Period> period_;  // the last one
  // Asked for, by the time of that; those before `num_seen_` have come.
  std::deque<PointPtr> unread_;
  size_t num_seen_ = 0;
};

}  // namespace smp::memory
