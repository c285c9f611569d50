#include "csrc/health/membership.h"

#include <cstddef>
#include <utility>

#include "csrc/common/check.h"

namespace smp::health {

Membership::Membership(int world_size)
    : states_(static_cast<size_t>(world_size), State::kMissing) {}

std::string Membership::refusal(int global_rank) const {
  if (global_rank < 0 || global_rank >= world_size()) {
    return "ranks are 0 to " + std::to_string(world_size() - 1);
  }
  return states_[static_cast<size_t>(global_rank)] == State::kMissing
             ? ""
             : "another process has this rank";
}

void Membership::on_come(int global_rank) {
  SMP_ASSERT(refusal(global_rank).empty(), "global_rank ", global_rank,
             " comes twice");
  states_[static_cast<size_t>(global_rank)] = State::kThere;
  ++num_there_;
}

void Membership::on_left(int global_rank, Goodbye goodbye) {
  SMP_CHECK(is_there(global_rank), "global_rank ", global_rank,
            " says goodbye and is not there");
  states_[static_cast<size_t>(global_rank)] = State::kLeft;
  --num_there_;
  left_.emplace(global_rank, std::move(goodbye));
  left_ranks_.add(global_rank);
}

bool Membership::on_lost(int global_rank) {
  if (!is_there(global_rank)) return false;
  states_[static_cast<size_t>(global_rank)] = State::kLost;
  --num_there_;
  ++num_lost_;
  return true;
}

bool Membership::is_there(int global_rank) const {
  return states_[static_cast<size_t>(global_rank)] == State::kThere;
}

bool Membership::is_complete() const {
  return num_there_ + static_cast<int>(left_.size()) == world_size();
}

bool Membership::all_have_left() const {
  return static_cast<int>(left_.size()) == world_size();
}

bool Membership::all_are_gone() const {
  return static_cast<int>(left_.size()) + num_lost_ == world_size();
}

std::optional<int> Membership::left_before(
    const CollectiveId& collective) const {
  for (const int rank : collective.ranks) {
    const auto goodbye = left_.find(rank);
    if (goodbye != left_.end() &&
        !goodbye->second.entered.has_entered(collective)) {
      return rank;
    }
  }
  return std::nullopt;
}

}  // namespace smp::health
