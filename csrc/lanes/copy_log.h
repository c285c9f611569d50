#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "csrc/common/monotonic_clock.h"
#include "csrc/lanes/descriptor.h"
#include "csrc/memory/device_clock.h"
#include "csrc/memory/mark.h"

namespace smp::lanes {

/// The copy of a tensor over a lane, at one of its two ends.
struct LaneCopy {
  bool is_sent = false;
  int peer = -1;  ///< global rank at the other end
  LaneKind lane = LaneKind::kHost;
  int64_t num_bytes = 0;
  /// Times by `monotonic_ns`: when the lane got the tensor or its descriptor,
  /// and when this rank's part of the copy was over.
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t uncertainty_ns = 0;  ///< of `end_ns`
};

/// Records the copies that the lanes of a rank make. Off by default: a call
/// then costs one relaxed load. Keeps the youngest copies. Any thread may call.
class CopyLog {
 public:
  struct Recording {
    std::vector<LaneCopy> copies;  ///< by the time they were asked for
    int64_t num_dropped = 0;       ///< older ones
  };

  explicit CopyLog(c10::Device device) : device_(device) {}

  /// @param clock  measures the ends of copies of a device; unused on the CPU
  void start(size_t capacity, std::shared_ptr<memory::DeviceClock> clock);
  void stop() { on_.store(false, std::memory_order_relaxed); }
  /// Returns the records after waiting for copies that are not over. The copy
  /// of a failed lane, which never ends, is left out after two seconds.
  Recording take();
  /// Drops all records without waiting.
  void discard();

  /// Returns the time that `add_sent` and `add_received` need; 0 while off.
  int64_t now_if_on() const { return is_on() ? monotonic_ns() : 0; }
  /// @param end  end of the copy; an empty mark is over
  void add_sent(int dst, const Descriptor& what, int64_t asked_ns,
                const memory::Mark& end) {
    if (is_on() && asked_ns > 0) add(true, dst, what, asked_ns, end);
  }
  void add_received(int src, const Descriptor& what, int64_t asked_ns,
                    const memory::Mark& end) {
    if (is_on() && asked_ns > 0) add(false, src, what, asked_ns, end);
  }

 private:
  struct Entry {
    LaneCopy copy;
    memory::Mark end;                     // of the host; else
    memory::DeviceClock::PointPtr point;  // of a device
  };

  bool is_on() const { return on_.load(std::memory_order_relaxed); }
  void add(bool is_sent, int peer, const Descriptor& what, int64_t asked_ns,
           const memory::Mark& end);
  void add_recorded(const LaneCopy& copy, const memory::Mark& end);
  const c10::Stream& stream_locked(const LaneCopy& copy);

  const c10::Device device_;
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  size_t capacity_ = 0;
  std::shared_ptr<memory::DeviceClock> clock_;
  std::deque<Entry> entries_;
  int64_t num_dropped_ = 0;
  // A stream for each lane and peer, whose copies end in their order.
  std::map<std::tuple<bool, int, LaneKind>, c10::Stream> streams_;
};

}  // namespace smp::lanes
