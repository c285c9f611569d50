// Which of the ready contexts gets the baton.

#include <algorithm>
#include <tuple>
#include <utility>

#include "csrc/pipeline/scheduler.h"

namespace smp::pipeline {

bool Scheduler::body_may_start_locked() const {
  return !bodies_to_start_.empty() &&
         num_bodies_in_flight_ < options_.active_microbatches;
}

StepProgress Scheduler::progress_locked() const {
  StepProgress progress;
  progress.num_microbatches = options_.num_microbatches;
  if (options_.lets_wait) {
    progress.num_partitions = options_.num_partitions;
    progress.num_chunks = options_.num_chunks;
    progress.depth = options_.depth;
    progress.active_microbatches = options_.active_microbatches;
    progress.begun = order_.begun();
    progress.ended = ended_microbatches_;
  }
  if (!options_.is_driver) return progress;
  // The first body runs while the others are still being added.
  const bool more_may_start =
      num_bodies_added_ < options_.num_microbatches &&
      num_bodies_in_flight_ < options_.active_microbatches;
  progress.num_forwards_pending =
      body_may_start_locked() || more_may_start ? 1 : 0;
  for (const auto& [context, owned] : contexts_) {
    if (context->key.module_id == TaskKey::kStepBody &&
        context->key.phase == Phase::kForward &&
        context->state != Context::State::kNotStarted) {
      ++progress.num_forwards_pending;
    }
  }
  return progress;
}

// The action of a schedule to which the next turn of a context belongs. Bodies
// of other ranks follow the driver and compute nothing of the model. The
// driver's body is the forward of its first chunk; then it waits for what
// others return and asks them for gradients, which is nobody's action; from
// when its own gradients come it is the backward of that chunk.
std::optional<Action> Scheduler::action_of(const Context& context) const {
  const TaskKey& key = context.key;
  if (key.module_id < TaskKey::kStepBody) return std::nullopt;
  if (key.module_id == TaskKey::kStepBody) {
    const bool is_action = key.phase == Phase::kForward
                               ? context.state == Context::State::kNotStarted
                               : context.awaits_gradients;
    if (!options_.is_driver || !is_action) return std::nullopt;
    return Action{key.phase, key.mb, 0};
  }
  const auto idx = static_cast<size_t>(key.module_id);
  const bool is_known =
      options_.chunk_idxs && idx < options_.chunk_idxs->size();
  return Action{key.phase, key.mb, is_known ? (*options_.chunk_idxs)[idx] : 0};
}

// Those in `ready_`, and the next body if it may start.
std::vector<ReadyTask> Scheduler::ready_tasks_locked() const {
  std::vector<ReadyTask> tasks;
  tasks.reserve(ready_.size() + 1);
  const auto add = [&](const Context& context) {
    const auto action = action_of(context);
    tasks.push_back({context.key, context.arrival,
                     context.state == Context::State::kNotStarted,
                     action ? action->chunk : 0});
  };
  for (const Context* context : ready_) add(*context);
  if (body_may_start_locked()) add(*bodies_to_start_.front());
  return tasks;
}

std::optional<size_t> Scheduler::find_agreed_locked(
    const std::vector<ReadyTask>& tasks) {
  if (agreed_.empty() || agreed_.front().first != options_.step) {
    return std::nullopt;
  }
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].key != agreed_.front().second) continue;
    agreed_.pop_front();
    return i;
  }
  return std::nullopt;
}

// What belongs to no action is short and others wait for it; an action of
// several modules is not interrupted; all else is the policy's.
std::optional<size_t> Scheduler::pick_locked(
    const std::vector<ReadyTask>& tasks) const {
  if (options_.lets_wait) {
    std::optional<size_t> at_once;
    std::optional<size_t> further;
    const auto earlier = [&](size_t i, const std::optional<size_t>& other) {
      return !other || tasks[i].arrival < tasks[*other].arrival;
    };
    for (size_t i = 0; i < tasks.size(); ++i) {
      const Context& context =
          i < ready_.size() ? *ready_[i] : *bodies_to_start_.front();
      const auto action = action_of(context);
      if (!action && earlier(i, at_once)) at_once = i;
      if (action && action == last_action_ && earlier(i, further)) further = i;
    }
    if (at_once) return at_once;
    if (further) return further;
  }
  return options_.policy->pick(tasks, progress_locked());
}

// Asks the policy (or the agreed order) and takes the choice off the lists.
Context* Scheduler::choose_locked() {
  const std::vector<ReadyTask> tasks = ready_tasks_locked();
  const auto choice = options_.order == OrderRole::kFollower
                          ? find_agreed_locked(tasks)
                          : pick_locked(tasks);
  return choice ? take_locked(*choice) : nullptr;
}

Context* Scheduler::take_locked(size_t choice) {
  Context* chosen = nullptr;
  if (choice == ready_.size()) {
    chosen = bodies_to_start_.front();
    bodies_to_start_.pop_front();
    ++num_bodies_in_flight_;
  } else {
    chosen = ready_[choice];
    ready_.erase(ready_.begin() + static_cast<int64_t>(choice));
  }
  if (options_.order == OrderRole::kLeader && order_sink_) {
    order_sink_(options_.step, chosen->key);
  }
  return chosen;
}

std::string Scheduler::run_held_back() {
  Lock lock(mutex_);
  if (running_ || !in_step_ || cancel_reason_ || !options_.lets_wait ||
      options_.order == OrderRole::kFollower) {
    return {};
  }
  const std::vector<ReadyTask> tasks = ready_tasks_locked();
  const auto rank = [&](size_t i) {
    return std::tuple(tasks[i].key.mb, tasks[i].key.phase == Phase::kForward,
                      tasks[i].arrival);
  };
  std::optional<size_t> best;
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (!best || rank(i) < rank(*best)) best = i;
  }
  if (!best) return {};
  Context* chosen = take_locked(*best);
  std::string what = chosen->where;
  switch_to_locked(chosen);
  return what;
}

}  // namespace smp::pipeline
