#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "csrc/health/liveness_frame.h"

namespace smp::health {

/// Part of the hub: notices that some ranks have waited for long while nothing
/// moves anywhere, and collects words and stacks of all ranks. That is a
/// report and no fault, because a slow rank looks the same. One thread.
class HangWatch {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param after  how long nothing moves before a report; 0: never
  HangWatch(int world_size, std::chrono::milliseconds after)
      : world_size_(world_size), after_(after) {}

  /// A status of a rank has come.
  void on_status(int global_rank, const LivenessFrame& status,
                 Clock::time_point now);
  void on_stacks(int global_rank, const std::string& stacks);
  void on_gone(int global_rank);

  /// @return a report when it is time for one; all ranks are to be asked for
  ///         their stacks then
  std::optional<std::string> due_report(Clock::time_point now);

  /// @return the stacks, once those of all ranks are there or have had time
  std::optional<std::string> due_stacks(Clock::time_point now);

 private:
  struct Rank {
    LivenessFrame status;
    Clock::time_point status_at;
    Clock::time_point changed_at;  ///< progress, or whether it waits
    bool is_gone = false;
  };

  static std::string describe(const Rank& rank, Clock::time_point now);

  const int world_size_;
  const std::chrono::milliseconds after_;
  std::map<int, Rank> ranks_;
  std::optional<Clock::time_point> reported_at_;
  std::optional<Clock::time_point> stacks_asked_at_;
  std::map<int, std::string> stacks_;
};

}  // namespace smp::health
