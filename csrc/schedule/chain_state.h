#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/schedule/simulator.h"

namespace smp::schedule {

/// The state of a simulated step: finished tasks, and the needs of each task. A
/// task is (stage, action of this stage and its rank).
class ChainState {
 public:
  enum class Status : int8_t { kAbsent, kWaiting, kReady, kRunning, kDone };

  struct Task {
    int stage = 0;
    Phase phase = Phase::kForward;
    int mb = 0;
  };

  ChainState(const SimulationInput& input,
             const std::vector<const Policy*>& policies);

  int num_stages() const { return static_cast<int>(stages_.size()); }
  int num_ranks() const { return num_ranks_; }
  int num_microbatches() const { return num_microbatches_; }
  int active_microbatches() const { return active_microbatches_; }
  int driver() const { return stages_.front().rank; }
  int rank_of(int stage) const { return stages_[stage].rank; }
  int num_chunks(int rank) const {
    return static_cast<int>(stages_of_rank_[rank].size());
  }
  /// Returns the number of ranks that the chain meets before this one.
  int depth(int rank) const { return depth_[rank]; }

  Action action(const Task& task) const {
    return {task.phase, task.mb, chunk_[task.stage]};
  }
  Status status(const Task& task) const { return status_[index(task)]; }
  void set_status(const Task& task, Status status) {
    status_[index(task)] = status;
  }
  bool is_done(const Task& task) const { return status(task) == Status::kDone; }
  bool is_split(int stage, int mb) const {
    return status({stage, Phase::kWeight, mb}) != Status::kAbsent;
  }

  /// Number of microbatches whose body has begun; they begin in order.
  int num_begun = 0;
  /// Number of microbatches that have begun and are not yet over.
  int num_in_flight = 0;
  /// Number of microbatches whose forward has left the last stage.
  int num_forwards_done = 0;
  /// Per microbatch: whether the driver has sent it into its backward.
  std::vector<bool> may_go_back;

  bool may_begin_body() const {
    return num_begun < num_microbatches_ &&
           num_in_flight < active_microbatches_;
  }
  /// Returns whether nothing is left to do; otherwise `describe_stop` has a
  /// text.
  bool is_finished() const;
  /// Returns one line per rank: its next action and what that waits for.
  std::string describe_stop(const std::vector<const Policy*>& policies,
                            const Schedule* lists) const;

 private:
  size_t index(const Task& task) const {
    const auto phase = static_cast<size_t>(task.phase);
    return (phase * stages_.size() + static_cast<size_t>(task.stage)) *
               static_cast<size_t>(num_microbatches_) +
           static_cast<size_t>(task.mb);
  }
  std::string name(int stage, Phase phase, int mb) const;
  std::string reason(const Task& task, const Policy& policy) const;
  std::string next_of_rank(int rank, const Policy& policy,
                           const ActionList* list) const;

  const std::vector<StageCost>& stages_;
  const int num_microbatches_;
  int active_microbatches_ = 0;
  int num_ranks_ = 0;
  std::vector<std::vector<int>> stages_of_rank_;
  std::vector<int64_t> chunk_;  ///< per stage
  std::vector<int> depth_;      ///< per rank
  std::vector<Status> status_;
};

}  // namespace smp::schedule
