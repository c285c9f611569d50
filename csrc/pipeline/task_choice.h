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

/// The part of a rank in deciding the order of tasks among its data-parallel
/// peers.
enum class OrderRole {
  kFree,      ///< every rank decides for itself
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
  /// True if the policy sees what is under way, so that it may let forwards
  /// wait. Tasks that belong to no action then run at once.
  bool lets_wait = false;
};

/// The contexts that could run, and the choice of the next one, by the policy
/// or by the agreed order. Guarded by the scheduler's mutex, and so are the
/// contexts.
class TaskChoice {
 public:
  /// Receives each choice of a leader; must not block nor call back.
  using OrderSink = std::function<void(int64_t step, const TaskKey&)>;

  void set_order_sink(OrderSink sink) { order_sink_ = std::move(sink); }
  void begin_step(const StepOptions& options);
  const StepOptions& options() const { return options_; }

  /// Adds the body of a microbatch: it starts when `active_microbatches`
  /// allows, in the order of these calls.
  void add_body(Context* context);
  /// Adds a new service, or a context that can go on.
  void add_ready(Context* context);
  /// Adds the next task that the leader published.
  void add_agreed(int64_t step, const TaskKey& key);
  /// Drops ready tasks, bodies not started, and agreed tasks.
  void clear();

  /// Returns the next context; null when it is better to wait, or nothing is
  /// ready.
  Context* take_next();
  /// Returns the next context while the device has enough to do: only tasks
  /// that the policy does not choose, since they belong to no action or to the
  /// action begun last.
  Context* take_at_once();
  /// Returns whether `take_next` would take a task of the policy's choice.
  bool has_choice() const;
  /// Returns whether a choice has to wait until the device has come to the last
  /// task. Where the order is given or agreed on there is no choice, and a
  /// follower that waits would make its leader's collectives wait.
  bool is_bound_by_device() const {
    return options_.order != OrderRole::kFollower &&
           !options_.policy->has_fixed_order();
  }
  /// Returns the best of the ready tasks although the policy waits for another
  /// one. Null if nothing is held back or an agreed order counts.
  Context* take_held_back();
  /// Returns whether a body may go on with its backward without waiting for its
  /// turn.
  /// @param its_turn  reason of contexts that wait for their turn
  bool may_begin_backward(const char* its_turn) const;

  /// Notes that a turn of a context begins.
  /// @return whether a task of the schedule begins with it: false for work that
  ///     belongs to no action, and for a further part of the last action
  bool note_turn(const Context& context);
  void note_end(const Context& context);
  /// Returns the number of turns, except those of microbatches that
  /// `take_held_back` has begun since the last turn that counts.
  int64_t num_due_turns() const { return num_due_turns_; }
  /// Notes that no module of a microbatch has a backward to come.
  void end_backward(int64_t mb);
  /// Notes that no rank keeps anything of a microbatch any more.
  void end_microbatch(int64_t mb) { ended_microbatches_.push_back(mb); }
  /// Skips an action of the schedule that has nothing to do here.
  void skip_action(const Action& action) { order_.skip(action); }

  /// Returns the tasks in the order in which they first ran in the last step.
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
  // Number of backwards of the last microbatch, also of an earlier step.
  int expected_backwards_ = 0;
};

}  // namespace smp::pipeline
