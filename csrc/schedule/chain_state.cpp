#include "csrc/schedule/chain_state.h"

#include <algorithm>

#include "csrc/common/check.h"

namespace smp::schedule {

ChainState::ChainState(const SimulationInput& input,
                       const std::vector<const Policy*>& policies)
    : stages_(input.stages),
      num_microbatches_(input.num_microbatches),
      num_ranks_(static_cast<int>(policies.size())) {
  stages_of_rank_.resize(policies.size());
  depth_.resize(policies.size());
  int num_met = 0;
  for (int s = 0; s < num_stages(); ++s) {
    auto& stages = stages_of_rank_[stages_[s].rank];
    if (stages.empty()) depth_[stages_[s].rank] = num_met++;
    chunk_.push_back(static_cast<int64_t>(stages.size()));
    stages.push_back(s);
  }
  active_microbatches_ = input.active_microbatches > 0
                             ? input.active_microbatches
                             : policies[driver()]->default_active_microbatches(
                                   num_ranks_, num_microbatches_);
  active_microbatches_ = std::min(active_microbatches_, num_microbatches_);
  may_go_back.resize(num_microbatches_);

  status_.assign(3 * stages_.size() * num_microbatches_, Status::kWaiting);
  for (int s = 0; s < num_stages(); ++s) {
    for (int mb = 0; mb < num_microbatches_; ++mb) {
      if (!policies[rank_of(s)]->splits_backward(mb, chunk_[s])) {
        set_status({s, Phase::kWeight, mb}, Status::kAbsent);
      }
    }
  }
}

bool ChainState::is_finished() const {
  return std::ranges::all_of(status_, [](Status status) {
    return status == Status::kDone || status == Status::kAbsent;
  });
}

std::string ChainState::name(int stage, Phase phase, int mb) const {
  return to_string(action({stage, phase, mb})) + " of rank " +
         std::to_string(rank_of(stage));
}

std::string ChainState::reason(const Task& task, const Policy& policy) const {
  const auto [stage, phase, mb] = task;
  if (phase == Phase::kWeight) return name(stage, Phase::kBackward, mb);
  if (phase == Phase::kForward) {
    if (stage > 0) return name(stage - 1, Phase::kForward, mb);
    if (mb > num_begun) return name(0, Phase::kForward, mb - 1);
    return "a microbatch to end: " + std::to_string(num_in_flight) +
           " of at most " + std::to_string(active_microbatches_) +
           " are in flight";
  }
  if (!is_done({stage, Phase::kForward, mb})) {
    return name(stage, Phase::kForward, mb);
  }
  if (stage + 1 < num_stages()) {
    return name(stage + 1, Phase::kBackward, mb);
  }
  return "the driver's policy '" + policy.name() +
         "' to begin the backward of microbatch " + std::to_string(mb);
}

std::string ChainState::next_of_rank(int rank, const Policy& policy,
                                     const ActionList* list) const {
  // Takes the first entry that is not done; without a list the oldest task.
  std::vector<Task> tasks;
  if (list) {
    for (const Action& a : *list) {
      tasks.push_back(
          {stages_of_rank_[rank][a.chunk], a.phase, static_cast<int>(a.mb)});
    }
  } else {
    for (int mb = 0; mb < num_microbatches_; ++mb) {
      for (const Phase phase :
           {Phase::kForward, Phase::kBackward, Phase::kWeight}) {
        for (const int stage : stages_of_rank_[rank]) {
          tasks.push_back({stage, phase, mb});
        }
      }
    }
  }
  for (const Task& task : tasks) {
    const Status now = status(task);
    if (now == Status::kDone || now == Status::kAbsent) continue;
    const std::string what = to_string(action(task));
    if (now == Status::kReady) {
      return "could run " + what + ", but policy '" + policy.name() +
             "' holds it back";
    }
    return "next is " + what + ", which waits for " + reason(task, policy);
  }
  return "has done all its actions";
}

std::string ChainState::describe_stop(
    const std::vector<const Policy*>& policies, const Schedule* lists) const {
  std::string text;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    text +=
        "\n  rank " + std::to_string(rank) + ": " +
        next_of_rank(rank, *policies[rank], lists ? &(*lists)[rank] : nullptr);
  }
  return text;
}

}  // namespace smp::schedule
