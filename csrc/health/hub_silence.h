#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "csrc/health/fault_board.h"
#include "csrc/health/stack_dump.h"
#include "csrc/health/wait_registry.h"

namespace smp::health {

/// The rank that runs the hub in a thread.
inline constexpr int kHubRank = 0;

/// Part of a client: notices that the hub has fallen silent. The hub watches
/// all ranks, but cannot notice that its own process is stopped. Used by one
/// thread.
class HubSilence {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::chrono::milliseconds status_every;  ///< how often `check` is called
    /// Silence of the hub after which this rank reports it, if it waits. 0:
    /// never.
    std::chrono::milliseconds hang_after;
    bool hang_raises = false;  ///< twice the time is a fault
    std::optional<StackDump> stacks;
  };

  HubSilence(std::shared_ptr<FaultBoard> faults, Options options);

  void on_frame() { last_frame_at_ = Clock::now(); }
  Clock::time_point last_frame_at() const { return last_frame_at_; }

  /// @param snapshot  the current waits of this rank
  void check(const WaitRegistry::Snapshot& snapshot);

 private:
  void leave_pause_out(Clock::time_point now);
  void fail(Clock::duration silence, const std::string& what);
  void report(Clock::duration silence, const std::string& what);
  bool is_watcher() const;

  const std::shared_ptr<FaultBoard> faults_;
  const Options options_;
  Clock::time_point checked_at_ = Clock::now();
  Clock::time_point last_frame_at_ = Clock::now();
  std::optional<Clock::time_point> blocked_since_;
  Clock::time_point reported_at_;
};

}  // namespace smp::health
