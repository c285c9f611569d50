#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "csrc/health/collective_log.h"
#include "csrc/health/rank_set.h"

namespace smp::health {

/// Part of the hub: which ranks have come, said goodbye, or are lost. Each
/// answer but `left_before` takes the same time for any number of ranks. One
/// thread.
class Membership {
 public:
  /// What is kept of a rank that has said goodbye.
  struct Goodbye {
    std::string where;             ///< in words, as its last status said
    CollectiveLog::State entered;  ///< what it has done its part of
  };

  explicit Membership(int world_size);

  int world_size() const { return static_cast<int>(states_.size()); }

  /// Why a process may not have this rank; empty: it may.
  std::string refusal(int global_rank) const;
  /// @param global_rank  that is not refused
  void on_come(int global_rank);
  void on_left(int global_rank, Goodbye goodbye);
  /// Its connection has ended.
  /// @return whether that is its death
  bool on_lost(int global_rank);

  /// It has come, and has neither said goodbye nor been lost.
  bool is_there(int global_rank) const;
  int num_there() const { return num_there_; }
  /// Nobody is missing: all are there, or have said goodbye.
  bool is_complete() const;
  bool all_have_left() const;
  /// All have said goodbye, or are lost.
  bool all_are_gone() const;

  const std::map<int, Goodbye>& left() const { return left_; }
  const RankSet& left_ranks() const { return left_ranks_; }
  /// A rank of the collective that has left and will not do its part.
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
