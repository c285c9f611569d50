#pragma once

#include <chrono>
#include <optional>
#include <vector>

namespace smp::health {

/// One rank's part in the question whether the run stands still.
struct RankState {
  int global_rank = 0;
  bool has_left = false;
  /// The rank waits for other ranks, by its last status.
  bool waits = false;
  /// The last status is old: the rank is stopped or cut off.
  bool is_silent = false;
  std::chrono::milliseconds waits_for{0};    ///< time of the wait so far
  std::chrono::milliseconds unmoved_for{0};  ///< time since its last progress
};

/// The state in which some rank waits, and no rank that could end the wait
/// moves.
struct Standstill {
  /// The shorter of two times: the longest wait, and the time since a rank of
  /// `stuck` has moved (any rank, if `stuck` is empty).
  std::chrono::milliseconds lasts{0};
  /// Ranks that neither wait nor move, silent ones included, ascending. If
  /// empty, all ranks wait for something that does not come.
  std::vector<int> stuck;
  /// Some rank that waits is not silent.
  bool is_heard = false;
};

/// @return the standstill, or nothing when no rank waits
std::optional<Standstill> find_standstill(const std::vector<RankState>& ranks);

}  // namespace smp::health
