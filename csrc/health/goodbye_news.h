#pragma once

#include <chrono>
#include <optional>

#include "csrc/health/rank_set.h"

namespace smp::health {

/// Part of the hub: decides when the remaining ranks are told who has left. The
/// first goodbye is told at once and later ones together. A job that ends thus
/// takes a few messages per rank, not one per pair of ranks. A rank that has
/// left is told only once all have left. Used by one thread.
class GoodbyeNews {
 public:
  using Clock = std::chrono::steady_clock;

  /// Longest time goodbyes wait for others. It is far below
  /// FaultAwareWait::kLeftGrace, before which no wait misses a goodbye.
  static constexpr std::chrono::milliseconds kEvery{250};

  void on_left(int global_rank) { unsent_.add(global_rank); }

  /// @param is_end  whether this is the last call
  /// @return ranks whose goodbyes are to be told now; they count as told
  std::optional<RankSet> due(Clock::time_point now, bool is_end);

  /// Returns the time until goodbyes may be due, or nothing until a rank
  /// leaves.
  std::optional<Clock::duration> due_in(Clock::time_point now) const;

 private:
  RankSet unsent_;
  std::optional<Clock::time_point> sent_at_;
};

}  // namespace smp::health
