#include "csrc/pipeline/task_choice.h"

#include <algorithm>
#include <tuple>

namespace smp::pipeline {

void TaskChoice::begin_step(const StepOptions& options) {
  options_ = options;
  bodies_in_flight_.clear();
  num_bodies_added_ = 0;
  executed_.clear();
  order_ = schedule::ExecutedOrder();
  last_action_.reset();
  taken_early_.clear();
  ended_microbatches_.clear();
  num_backwards_.clear();
  going_back_.clear();
}

void TaskChoice::add_body(Context* context) {
  context->arrival = next_arrival_++;
  ++num_bodies_added_;
  bodies_to_start_.push_back(context);
}

void TaskChoice::add_ready(Context* context) {
  context->arrival = next_arrival_++;
  ready_.push_back(context);
}

void TaskChoice::add_agreed(int64_t step, const TaskKey& key) {
  agreed_.emplace_back(step, key);
}

void TaskChoice::clear() {
  ready_.clear();
  bodies_to_start_.clear();
  agreed_.clear();
}

bool TaskChoice::note_turn(const Context& context) {
  if (!taken_early_.contains(context.key.mb)) {
    taken_early_.clear();
    ++num_due_turns_;
  }
  const auto action = action_of(context);
  const bool begins_task =
      action && !(options_.lets_wait && action == last_action_);
  if (action) {
    order_.add(*action, context.key.resume > 0);
    last_action_ = action;
  }
  if (context.state == Context::State::kNotStarted) {
    executed_.push_back(context.key);
    if (action && action->phase == Phase::kBackward) {
      count_backward(action->mb);
    }
  }
  return begins_task;
}

// Counts the backwards of a microbatch. A backward of several modules frees its
// last activations with the last of these modules, and its requests come one by
// one: between two of them this rank may have nothing to do but a forward. The
// number to expect was learned from earlier microbatches; where a microbatch
// has fewer, its end counts.
void TaskChoice::count_backward(int64_t mb) {
  const int count = ++num_backwards_[mb];
  std::erase(going_back_, mb);
  if (count < expected_backwards_) going_back_.push_back(mb);
}

void TaskChoice::end_backward(int64_t mb) {
  std::erase(going_back_, mb);
  const auto found = num_backwards_.find(mb);
  if (found != num_backwards_.end()) expected_backwards_ = found->second;
}

void TaskChoice::note_end(const Context& context) {
  if (context.key.module_id != TaskKey::kStepBody) return;
  std::erase(bodies_in_flight_, &context);
  // A backward that never had to wait for gradients was part of this turn.
  if (options_.is_driver && context.key.phase == Phase::kBackward) {
    order_.add({Phase::kBackward, context.key.mb, 0}, /*goes_on=*/true);
  }
}

std::string TaskChoice::executed_actions() const {
  return schedule::to_string(order_.entries());
}

bool TaskChoice::body_may_start() const {
  return !bodies_to_start_.empty() &&
         static_cast<int>(bodies_in_flight_.size()) <
             options_.active_microbatches;
}

// Returns whether a body may begin its backward. A backward first issues
// requests that other ranks wait for; a longer task of an older microbatch must
// not hold those up. Turns are taken again when this context has to wait.
bool TaskChoice::may_begin_backward(const char* its_turn) const {
  const bool others_were_first = std::any_of(
      ready_.begin(), ready_.end(), [its_turn](const Context* other) {
        return other->waits_for == its_turn;
      });
  return options_.order == OrderRole::kFree && !others_were_first &&
         options_.policy->may_begin_backward(progress());
}

StepProgress TaskChoice::progress() const {
  StepProgress progress;
  progress.num_microbatches = options_.num_microbatches;
  if (options_.lets_wait) {
    progress.num_partitions = options_.num_partitions;
    progress.num_chunks = options_.num_chunks;
    progress.depth = options_.depth;
    progress.active_microbatches = options_.active_microbatches;
    progress.begun = order_.begun();
    progress.ended = ended_microbatches_;
    progress.going_back = going_back_;
  }
  if (!options_.is_driver) return progress;
  // The first body runs while the others are still being added.
  const bool more_may_start =
      num_bodies_added_ < options_.num_microbatches &&
      static_cast<int>(bodies_in_flight_.size()) < options_.active_microbatches;
  progress.num_forwards_pending = body_may_start() || more_may_start ? 1 : 0;
  for (const Context* body : bodies_in_flight_) {
    progress.num_forwards_pending += body->key.phase == Phase::kForward ? 1 : 0;
  }
  return progress;
}

// Returns the action of a schedule to which the next turn of a context belongs.
// Bodies of other ranks follow the driver and compute nothing of the model. The
// driver's body is the forward of its first chunk. Then it waits for the
// results of others and asks them for gradients, which belongs to no action.
// Once its own gradients come it is the backward of that chunk.
std::optional<Action> TaskChoice::action_of(const Context& context) const {
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

// Returns the tasks in `ready_`, and the next body if it may start.
std::vector<ReadyTask> TaskChoice::ready_tasks() const {
  std::vector<ReadyTask> tasks;
  tasks.reserve(ready_.size() + 1);
  const auto add = [&](const Context& context) {
    const auto action = action_of(context);
    tasks.push_back({context.key, context.arrival,
                     context.state == Context::State::kNotStarted,
                     action ? action->chunk : 0});
  };
  for (const Context* context : ready_) add(*context);
  if (body_may_start()) add(*bodies_to_start_.front());
  return tasks;
}

std::optional<size_t> TaskChoice::find_agreed(
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

// Picks the next task. A task that belongs to no action is short and others
// wait for it; an action of several modules is not interrupted; the policy
// picks among all else.
std::optional<size_t> TaskChoice::pick(
    const std::vector<ReadyTask>& tasks) const {
  if (const auto at_once = pick_at_once(tasks)) return at_once;
  return options_.policy->pick(tasks, progress());
}

std::optional<size_t> TaskChoice::pick_at_once(
    const std::vector<ReadyTask>& tasks) const {
  if (!options_.lets_wait) return std::nullopt;
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
  return at_once ? at_once : further;
}

// Asks the policy (or the agreed order) and takes the choice off the lists.
Context* TaskChoice::take_next() {
  const std::vector<ReadyTask> tasks = ready_tasks();
  const auto choice =
      options_.order == OrderRole::kFollower ? find_agreed(tasks) : pick(tasks);
  return choice ? take(*choice) : nullptr;
}

Context* TaskChoice::take_at_once() {
  const auto choice = pick_at_once(ready_tasks());
  return choice ? take(*choice) : nullptr;
}

bool TaskChoice::has_choice() const { return pick(ready_tasks()).has_value(); }

Context* TaskChoice::take(size_t choice) {
  Context* chosen = nullptr;
  if (choice == ready_.size()) {
    chosen = bodies_to_start_.front();
    bodies_to_start_.pop_front();
    bodies_in_flight_.push_back(chosen);
  } else {
    chosen = ready_[choice];
    ready_.erase(ready_.begin() + static_cast<int64_t>(choice));
  }
  if (options_.order == OrderRole::kLeader && order_sink_) {
    order_sink_(options_.step, chosen->key);
  }
  return chosen;
}

Context* TaskChoice::take_held_back() {
  if (!options_.lets_wait || options_.order == OrderRole::kFollower) {
    return nullptr;
  }
  const std::vector<ReadyTask> tasks = ready_tasks();
  const auto rank = [&](size_t i) {
    return std::tuple(tasks[i].key.mb, tasks[i].key.phase == Phase::kForward,
                      tasks[i].arrival);
  };
  std::optional<size_t> best;
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (!best || rank(i) < rank(*best)) best = i;
  }
  if (!best) return nullptr;
  taken_early_.insert(tasks[*best].key.mb);
  return take(*best);
}

}  // namespace smp::pipeline
