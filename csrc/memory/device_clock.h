#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

namespace smp::memory {

/// Measures when a device came to points in its work, on the clock of the host,
/// for people: no thread waits for a point before `settle`.
///
/// A device has a clock of its own, which only measures the time between two
/// points. Each period (a step) has one offset between both clocks. A point
/// comes after the host asked for it, and before the host saw that it had come.
/// Each point thus bounds the offset from both sides, and the tightest bounds
/// count. The offset is their middle, and half of their distance is the
/// uncertainty. Thread-safe.
class DeviceClock {
 public:
  class Point;
  using PointPtr = std::shared_ptr<Point>;

  /// A time by `monotonic_ns`, with the largest error in either direction.
  struct Time {
    int64_t ns = 0;
    int64_t uncertainty_ns = 0;
  };

  explicit DeviceClock(c10::Device device);
  ~DeviceClock();

  /// Begins a period: later points are compared with the end of the work that
  /// `stream` has now.
  void begin_period(const c10::Stream& stream);
  /// Returns the end of the work of `stream` so far; null before the first
  /// period.
  PointPtr point(const c10::Stream& stream);

  /// Waits until the device has come to all points.
  void settle();
  /// Returns the time of a point; call it after `settle`.
  Time time_of(const Point& point) const;

 private:
  struct Period;

  void look_locked();
  void read_locked(Point& point);

  const c10::Device device_;
  mutable std::mutex mutex_;
  std::shared_ptr<Period> period_;  // the last one
  // Points in the order of their requests; those before `num_seen_` have come.
  std::deque<PointPtr> unread_;
  size_t num_seen_ = 0;
};

}  // namespace smp::memory
