#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "csrc/health/fault_board.h"
#include "csrc/memory/mark.h"

namespace smp::lanes {

/// Options of the lanes of tests. The environment gives them to a process:
/// SMP_TEST_LANES="<seed>:<max_us>:<slots>", or with ":ring", ":meet" or
/// ":ring:meet" at the end.
struct FakeOptions {
  uint64_t seed = 0;
  int64_t max_us = 0;  ///< a copy ends at most that late
  int num_slots = 4;   ///< for the tensors that one rank has in flight
  /// After so many copies of a rank none ends any more; -1: all end.
  int64_t num_ending = -1;
  /// A FakeLane takes a tensor after a random time, for which it blocks, as a
  /// driver may that has no room for a launch.
  bool has_late_takes = false;
  /// An IpcLane over memory of the host, instead of a FakeLane.
  bool has_ring = false;
  int64_t slot_bytes = 64 << 10;  ///< of the ring
  /// An NcclLane over copies that need both ranks, instead of a FakeLane, for
  /// pairs that have no ring. `num_slots` of a pair in one direction.
  bool has_meeting = false;

  /// @throws ValueError when the variable is set to something else
  static std::optional<FakeOptions> from_environment();
};

/// Random times after which copies end. Not thread-safe.
class CopyTimes {
 public:
  CopyTimes(const FakeOptions& options, int global_rank);

  /// Returns the time of the next copy, or nothing if it never ends.
  std::optional<std::chrono::microseconds> next();

 private:
  const int64_t max_us_;
  const int64_t num_ending_;
  uint64_t random_;
  int64_t num_copies_ = 0;
};

/// The end of work that a thread does. An event lives as long as it may be
/// waited for. The thread that blocks plays a stream.
class LateEvent final : public memory::Mark::Event {
 public:
  explicit LateEvent(std::shared_ptr<health::FaultBoard> faults);

  void block(const c10::Stream& stream) const override;
  bool is_over() const override;
  int64_t over_ns() const override;

  void end();
  /// Ends the waits: the event will not come any more.
  void drop() { set(is_dropped_); }

 private:
  void set(bool& what);

  const std::shared_ptr<health::FaultBoard> faults_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  int64_t over_ns_ = 0;  // when it ended
  bool is_over_ = false;
  bool is_dropped_ = false;
};

/// Fills a tensor with NaN, or with an unlikely number if it cannot hold NaN.
void fill_with_nonsense(const at::Tensor& tensor);

}  // namespace smp::lanes
