#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "csrc/health/liveness_frame.h"
#include "csrc/health/membership.h"

namespace smp::health {

/// Part of the hub: finds deadlocks. In a deadlock every remaining rank waits,
/// has no message under way, and has not moved for a time, and no rank waits
/// for a collective that all of its ranks have entered. Used by one thread.
class DeadlockSearch {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param after  how long nothing has moved in a deadlock
  /// @param valid  age beyond which a status is ignored
  DeadlockSearch(const Membership& members, std::chrono::milliseconds after,
                 std::chrono::milliseconds valid);

  void on_come(int global_rank, Clock::time_point now);
  void on_status(int global_rank, LivenessFrame status, Clock::time_point now);
  /// Restarts the search: the last act of a rank may have freed others, whose
  /// reports are older.
  void on_left(Clock::time_point now) { freed_at_ = now; }

  /// Returns the newest status of a rank; its texts are empty before the first.
  const LivenessFrame& status(int global_rank) const;

  /// @return a table of all ranks and their waits, or nothing without a
  ///         deadlock
  std::optional<std::string> find(Clock::time_point now) const;

 private:
  // The newest status of a rank, and the time since when it waits there.
  struct Rank {
    LivenessFrame status;
    std::optional<Clock::time_point> status_at;
    Clock::time_point stuck_since;
  };

  bool is_stuck(const Rank& rank, Clock::time_point now) const;
  bool some_collective_goes_on(const std::vector<int>& stuck) const;
  std::string table(const std::vector<int>& stuck, Clock::time_point now) const;
  std::string headline() const;

  const Membership& members_;
  const std::chrono::milliseconds after_;
  const std::chrono::milliseconds valid_;
  std::vector<Rank> ranks_;  // by global rank
  Clock::time_point freed_at_;
};

}  // namespace smp::health
