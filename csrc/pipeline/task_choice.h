#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "csrc/pipeline/context.h"
#include "csrc/schedule/policy.h"
#include "csrc/schedule/schedule_text.h"

namespace smp::pipeline {

using schedule::Action;
using schedule::Policy;
using schedule::ReadyTask;
using schedule::StepProgress;

/// Which data-parallel peer of a rank decides the order of tasks.
enum class OrderRole {
  kFree,      ///< every rank for itself
  kLeader,    ///< this rank decides and publishes
  kFollower,  ///< this rank runs what the leader published
};

struct StepOptions {
  const Policy* policy = nullptr;
  int num_microbatches = 1;
  int active_microbatches = 1;
  bool is_driver = true;
  OrderRole order = OrderRole::kFree;
  int64_t step = 0;
  int num_partitions = 1;
  int num_chunks = 1;
  int depth = 0;  ///< see schedule::StepProgress
  /// Chunk by module id; null: all are chunk 0. Must outlive the step.
  const std::vector<int>* chunk_idxs = nullptr;
  /// Whether the policy is told what is under way, so that it may let
  /// forwards wait. Then what belongs to no action runs at once.
  bool lets_wait = false;
};

/// The contexts that could run, and which of them does next: the policy's
/// choice, or the one that was agreed on. Belongs to the scheduler's mutex, and
/// so do the contexts.
class TaskChoice {
 public:
  /// Told of each choice of a leader; must not block nor call back.
  using OrderSink = std::function<void(int64_t step, const TaskKey&)>;

  void set_order_sink(OrderSink sink) { order_sink_ = std::move(sink); }
  void begin_step(const StepOptions& options);
  const StepOptions& options() const { return options_; }

  /// The body of a microbatch: it starts when `active_microbatches` allows, in
  /// the order of these calls.
  void add_body(Context* context);
  /// A new service, or a context that can go on.
  void add_ready(Context* context);
  /// The next task that the leader published.
  void add_agreed(int64_t step, const TaskKey& key);
  /// Nothing is to run any more.
  void clear();

  /// Null when it is better to wait, or nothing is ready.
  Context* take_next();
  /// The same while the device has enough to do: only what the policy does not
  /// choose, since it belongs to no action or to the one that was begun last.
  Context* take_at_once();
  /// Whether `take_next` would take something that is the policy's choice.
  bool has_choice() const;
  /// Whether a choice has to wait until the device has come to the last task.
  /// Not where the order is given or agreed on: there is no choice, and a
  /// follower that waits would make its leader's collectives wait.
  bool is_bound_by_device() const {
    return options_.order != OrderRole::kFollower &&
           !options_.policy->has_fixed_order();
  }
  /// The best of the ready tasks although the policy waits for another one.
  /// Null if nothing is held back or an agreed order counts.
  Context* take_held_back();
  /// Whether a body may go on with its backward without waiting for its turn.
  /// @param its_turn  what those wait for that did
  bool may_begin_backward(const char* its_turn) const;

  /// A turn of a context begins.
  /// @return whether a task of the schedule begins with it: not with what
  ///     belongs to no action, nor with a further part of the last action
  bool note_turn(const Context& context);
  void note_end(const Context& context);
  /// Turns of this object, but for those of microbatches that
  /// `take_held_back` has begun since the last one that counts.
  int64_t num_due_turns() const { return num_due_turns_; }
  /// No module of a microbatch has a backward to come.
  void end_backward(int64_t mb);
  /// Nothing of a microbatch is kept on any rank any more.
  void end_microbatch(int64_t mb) { ended_microbatches_.push_back(mb); }
  /// An action of the schedule has nothing to do here.
  void skip_action(const Action& action) { order_.skip(action); }

  /// Tasks in the order in which they first ran in the last step.
  const std::vector<TaskKey>& executed() const { return executed_; }
  std::string executed_actions() const;

 private:
  bool body_may_start() const;
  StepProgress progress() const;
  std::optional<Action> action_of(const Context& context) const;
  void count_backward(int64_t mb);
  std::vector<ReadyTask> ready_tasks() const;
  std::optional<size_t> find_agreed(const std::vector<ReadyTask>& tasks);
  std::optional<size_t> pick(const std::vector<ReadyTask>& tasks) const;
  std::optional<size_t> pick_at_once(const std::vector<ReadyTask>& tasks) const;
  Context* take(size_t choice);

  OrderSink order_sink_;
  StepOptions options_;
  std::vector<Context*> ready_;
  std::deque<Context*> bodies_to_start_;
  std::vector<Context*> bodies_in_flight_;
  int num_bodies_added_ = 0;
  std::deque<std::pair<int64_t, TaskKey>> agreed_;
  int64_t next_arrival_ = 0;
  std::vector<TaskKey> executed_;
  schedule::ExecutedOrder order_;
  std::optional<Action> last_action_;
  int64_t num_due_turns_ = 0;
  std::set<int64_t> taken_early_;  // microbatches that were held back
  std::vector<int64_t> ended_microbatches_;
  std::map<int64_t, int> num_backwards_;  // modules, by microbatch
  std::vector<int64_t> going_back_;
  // Of a microbatch: as many as the last one had, also of earlier steps.
  int expected_backwards_ = 0;
};

}  // namespace smp::pipeline
