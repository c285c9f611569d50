#pragma once

#include <chrono>
#include <optional>

#include "csrc/health/rank_set.h"

namespace smp::health {

/// Part of the hub: when the ranks that are still there hear who has left. The
/// first goodbye is told at once, those that follow it together, so that a job
/// that ends takes a few messages for each rank and not one for each pair. Who
/// has left needs to hear of nobody before all have. One thread.
class GoodbyeNews {
 public:
  using Clock = std::chrono::steady_clock;

  /// So long goodbyes may wait for others. Far below
  /// FaultAwareWait::kLeftGrace, within which nobody misses one.
  static constexpr std::chrono::milliseconds kEvery{250};

  void on_left(int global_rank) { untold_.add(global_rank); }

  /// @param is_end  there is no later
  /// @return who is to be told of now; counts as told
  std::optional<RankSet> due(Clock::time_point now, bool is_end);

  /// How long until something may be due; nothing: until somebody leaves.
  std::optional<Clock::duration> due_in(Clock::time_point now) const;

 private:
  RankSet untold_;
  std::optional<Clock::time_point> told_at_;
};

}  // namespace smp::health
