#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "csrc/health/collective_log.h"
#include "csrc/health/rank_set.h"

namespace smp::health {

/// Part of the hub: the ranks that have come, said goodbye, or are lost. Each
/// answer but `left_before` takes the same time for any number of ranks. Used
/// by one thread.
class Membership {
 public:
  /// The record of a rank that has said goodbye.
  struct Goodbye {
    std::string where;             ///< place, in words of its last status
    CollectiveLog::State entered;  ///< collectives that it has done its part of
  };

  explicit Membership(int world_size);

  int world_size() const { return static_cast<int>(states_.size()); }

  /// Returns why a process may not have this rank; empty: it may.
  std::string refusal(int global_rank) const;
  /// @param global_rank  rank that is not refused
  void on_come(int global_rank);
  void on_left(int global_rank, Goodbye goodbye);
  /// Records that the connection of a rank has ended.
  /// @return whether that is its death
  bool on_lost(int global_rank);

  /// Returns whether the rank has come, and has neither said goodbye nor been
  /// lost.
  bool is_there(int global_rank) const;
  int num_there() const { return num_there_; }
  /// Returns whether no rank is missing: each is there or has said goodbye.
  bool is_complete() const;
  bool all_have_left() const;
  /// Returns whether each rank has said goodbye or is lost.
  bool all_are_gone() const;

  const std::map<int, Goodbye>& left() const { return left_; }
  const RankSet& left_ranks() const { return left_ranks_; }
  /// Returns a rank of the collective that has left and will not do its part.
  std::optional<int> left_before(const CollectiveId& collective) const;

 private:
  enum class State : unsigned char { kMissing, kThere, kLeft, kLost };

  std::vector<State> states_;  // by global rank
  int num_there_ = 0;
  int num_lost_ = 0;
  std::map<int, Goodbye> left_;
  RankSet left_ranks_;
};

}  // namespace smp::health
