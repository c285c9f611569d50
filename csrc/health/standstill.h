#pragma once

#include <chrono>
#include <optional>
#include <vector>

namespace smp::health {

/// What is known of one rank, for the question whether the run stands still.
struct RankState {
  int global_rank = 0;
  bool has_left = false;
  /// It waits for other ranks, as it said last.
  bool waits = false;
  /// That was long ago: it is stopped, or cut off.
  bool is_silent = false;
  std::chrono::milliseconds waits_for{0};    ///< how long already
  std::chrono::milliseconds unmoved_for{0};  ///< since its last progress
};

/// Some rank waits, and no rank that could end the wait moves.
struct Standstill {
  /// No rank that does not wait has moved for so long, and the rank that has
  /// waited longest waits for so long.
  std::chrono::milliseconds lasts{0};
  /// Ranks that neither wait nor move, silent ones among them, ascending. None:
  /// all wait, and what they wait for does not come.
  std::vector<int> stuck;
  /// Some rank that waits is not silent.
  bool is_heard = false;
};

/// @return nothing when no rank waits
std::optional<Standstill> find_standstill(const std::vector<RankState>& ranks);

}  // namespace smp::health
