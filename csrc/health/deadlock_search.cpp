#include "csrc/health/deadlock_search.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <tuple>
#include <utility>

#include "csrc/health/collective_log.h"

namespace smp::health {
namespace {

std::string rank_text(int global_rank, const std::string& where) {
  return "global_rank " + std::to_string(global_rank) +
         (where.empty() ? "" : " (" + where + ")");
}

}  // namespace

DeadlockSearch::DeadlockSearch(const Membership& members,
                               std::chrono::milliseconds after,
                               std::chrono::milliseconds valid)
    : members_(members),
      after_(after),
      valid_(valid),
      ranks_(static_cast<size_t>(members.world_size())) {}

void DeadlockSearch::on_come(int global_rank, Clock::time_point now) {
  ranks_[static_cast<size_t>(global_rank)].stuck_since = now;
}

void DeadlockSearch::on_status(int global_rank, LivenessFrame status,
                               Clock::time_point now) {
  Rank& rank = ranks_[static_cast<size_t>(global_rank)];
  const bool is_same = status.is_blocked && status.num_unsent == 0 &&
                       rank.status.is_blocked &&
                       status.progress == rank.status.progress;
  if (!is_same) rank.stuck_since = now;
  rank.status = std::move(status);
  rank.status_at = now;
}

const LivenessFrame& DeadlockSearch::status(int global_rank) const {
  return ranks_[static_cast<size_t>(global_rank)].status;
}

bool DeadlockSearch::is_stuck(const Rank& rank, Clock::time_point now) const {
  const bool is_fresh = rank.status_at && now - *rank.status_at < valid_;
  return is_fresh && rank.status.is_blocked && rank.status.num_unsent == 0 &&
         now - std::max(rank.stuck_since, freed_at_) >= after_;
}

std::optional<std::string> DeadlockSearch::find(Clock::time_point now) const {
  if (!members_.is_complete()) return std::nullopt;  // not yet there, or dead
  std::vector<int> stuck;
  for (int rank = 0; rank < members_.world_size(); ++rank) {
    if (!members_.is_there(rank)) continue;
    if (!is_stuck(ranks_[static_cast<size_t>(rank)], now)) return std::nullopt;
    stuck.push_back(rank);
  }
  if (stuck.empty() || some_collective_goes_on(stuck)) return std::nullopt;
  return table(stuck, now);
}

// Returns whether all ranks of a collective that is waited for have entered it.
// Looks at each collective once, not once for each rank that waits for it.
bool DeadlockSearch::some_collective_goes_on(
    const std::vector<int>& stuck) const {
  using State = CollectiveLog::State;
  std::vector<State> states(ranks_.size());
  for (const int rank : stuck) {
    states[static_cast<size_t>(rank)] = State::decode(status(rank).collectives);
  }
  for (const auto& [rank, goodbye] : members_.left()) {
    states[static_cast<size_t>(rank)] = goodbye.entered;
  }
  const auto has_entered = [&](int rank, const CollectiveId& collective) {
    return rank >= 0 && rank < members_.world_size() &&
           states[static_cast<size_t>(rank)].has_entered(collective);
  };
  std::set<std::tuple<uint64_t, int64_t, uint64_t, bool>> seen;
  return std::any_of(stuck.begin(), stuck.end(), [&](int waiting) {
    const auto& wait = states[static_cast<size_t>(waiting)].waits_for;
    return wait && !wait->ranks.empty() &&
           seen.emplace(wait->group, wait->sequence, wait->signature,
                        wait->goes_on_alone)
               .second &&
           std::all_of(wait->ranks.begin(), wait->ranks.end(),
                       [&](int rank) { return has_entered(rank, *wait); });
  });
}

std::string DeadlockSearch::table(const std::vector<int>& stuck,
                                  Clock::time_point now) const {
  std::string text = headline();
  for (const int number : stuck) {
    const Rank& rank = ranks_[static_cast<size_t>(number)];
    text += "\n  " + rank_text(number, rank.status.where) + ": in " +
            rank.status.text + " since " +
            seconds_text(std::chrono::milliseconds(rank.status.blocked_ms) +
                         (now - *rank.status_at));
  }
  for (const auto& [rank, goodbye] : members_.left()) {
    text += "\n  " + rank_text(rank, goodbye.where) + ": has left";
  }
  return text;
}

// Names the ranks that have left first: they are the reason if there are any.
std::string DeadlockSearch::headline() const {
  const std::string after = seconds_text(after_);
  const auto& left = members_.left();
  if (left.empty()) {
    return "every rank waits and nothing has moved for " + after +
           "; the ranks probably called different things, or in another order:";
  }
  std::string names;
  for (const auto& [rank, goodbye] : left) {
    if (!names.empty()) names += ", ";
    names += rank_text(rank, goodbye.where);
  }
  return names +
         (left.size() == 1 ? " has left (its script has finished)"
                           : " have left (their scripts have finished)") +
         ", every other rank waits, and nothing has moved for " + after + ":";
}

}  // namespace smp::health
