#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "csrc/health/liveness_frame.h"
#include "csrc/health/standstill.h"

namespace smp::health {

/// Part of the hub: notices that some ranks have waited for long while nothing
/// moves anywhere, and collects words and stacks of all ranks. It writes a
/// report, because a slow rank looks the same. After twice the time the ranks
/// that neither wait nor move become a fault, if the user wants that. There is
/// no fault while the Python stack of one of them changes: that rank is busy in
/// code of the script. Used by one thread.
class HangWatch {
 public:
  using Clock = std::chrono::steady_clock;

  /// The ranks that are stuck, as sent to all ranks.
  struct StuckRanks {
    std::vector<int> global_ranks;  ///< ascending, at least one
    std::string text;               ///< with their stacks
  };

  /// @param after   how long nothing moves before a report; 0: never
  /// @param raises  whether a rank that is stuck for twice as long is a fault
  HangWatch(int world_size, std::chrono::milliseconds after,
            bool raises = false)
      : world_size_(world_size), after_(after), raises_(raises) {}

  /// Notes that a rank is a process of this machine.
  void on_process(int global_rank, int pid) { pids_[global_rank] = pid; }
  /// Takes a status of a rank.
  void on_status(int global_rank, const LivenessFrame& status,
                 Clock::time_point now);
  void on_stacks(int global_rank, const std::string& stacks,
                 Clock::time_point now);
  void on_gone(int global_rank);
  /// Leaves out time in which the hub's thread did not run: it shows nothing
  /// about other ranks.
  void on_pause(Clock::duration pause);

  /// @return a report when one is due; all ranks are to be asked for their
  ///         stacks then
  std::optional<std::string> due_report(Clock::time_point now);

  /// @return ranks to be asked for their stacks without a report, to see
  ///         whether these change
  std::vector<int> due_looks(Clock::time_point now);

  /// @return the stacks, once all ranks have sent them or have had time to
  std::optional<std::string> due_stacks(Clock::time_point now);

  /// @return the stuck ranks when the run has to end: twice the time is over,
  ///         their stacks have been shown, and several looks at each of their
  ///         scripts have shown none that moved for the time
  std::optional<StuckRanks> due_fault(Clock::time_point now) const;

 private:
  struct Rank {
    LivenessFrame status;
    Clock::time_point status_at;
    Clock::time_point changed_at;  ///< progress, or whether it waits
    Clock::time_point waits_since;
    std::string script;  ///< its stack at the last look since `changed_at`
    std::optional<Clock::time_point> script_moved_at;
    int num_same_looks = 0;         ///< since the script was last seen to move
    Clock::time_point answered_at;  ///< with stacks, or `changed_at`
    bool is_asked = false;          ///< for its stacks, which have not come
    bool is_gone = false;
  };

  std::optional<Standstill> standstill(Clock::time_point now) const;
  std::string describe(int global_rank, Clock::time_point now) const;
  bool is_busy(int global_rank, Clock::time_point now) const;
  bool is_seen_stuck(int global_rank, Clock::time_point now) const;
  std::string end_text(const Standstill& found, Clock::time_point now) const;

  const int world_size_;
  const std::chrono::milliseconds after_;
  const bool raises_;
  std::map<int, Rank> ranks_;
  std::map<int, int> pids_;
  std::optional<Clock::time_point> reported_at_;
  std::chrono::milliseconds reported_{0};  // how long it had lasted then
  std::optional<Clock::time_point> stacks_asked_at_;
  Clock::time_point looked_at_;  // when stuck ranks were last asked
  std::map<int, std::string> stacks_;
};

/// Returns the innermost lines of each thread in the stacks of a rank, for an
/// error.
std::string innermost_lines(const std::string& stacks);

}  // namespace smp::health
