#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "csrc/health/fault_board.h"
#include "csrc/health/stack_dump.h"
#include "csrc/health/wait_registry.h"

namespace smp::health {

/// The hub is a thread of this rank.
inline constexpr int kHubRank = 0;

/// Part of a client: whether the hub has fallen silent. It looks after all
/// ranks, and cannot tell that its own is stopped. One thread.
class HubSilence {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::chrono::milliseconds status_every;  ///< how often `look` is called
    /// A report when this rank waits and the hub is silent for so long. 0:
    /// never.
    std::chrono::milliseconds hang_after;
    bool hang_raises = false;  ///< twice the time is a fault
    std::optional<StackDump> stacks;
  };

  HubSilence(std::shared_ptr<FaultBoard> faults, Options options);

  void on_heard() { heard_at_ = Clock::now(); }
  Clock::time_point heard_at() const { return heard_at_; }

  /// @param snapshot  what this rank waits for now
  void look(const WaitRegistry::Snapshot& snapshot);

 private:
  void leave_pause_out(Clock::time_point now);
  void fail(Clock::duration silence, const std::string& what);
  void report(Clock::duration silence, const std::string& what);
  bool is_watcher() const;

  const std::shared_ptr<FaultBoard> faults_;
  const Options options_;
  Clock::time_point looked_at_ = Clock::now();
  Clock::time_point heard_at_ = Clock::now();
  std::optional<Clock::time_point> blocked_since_;
  Clock::time_point reported_at_;
};

}  // namespace smp::health
