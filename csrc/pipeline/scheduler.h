#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "csrc/mailbox/mailbox.h"
#include "csrc/pipeline/context.h"
#include "csrc/pipeline/context_threads.h"
#include "csrc/pipeline/timeline.h"
#include "csrc/schedule/policy.h"
#include "csrc/schedule/schedule_text.h"

namespace smp::pipeline {

using schedule::Action;
using schedule::Policy;
using schedule::ReadyTask;
using schedule::StepProgress;

/// Who decides the order of tasks among the data-parallel peers of a rank.
enum class OrderRole {
  kFree,      ///< every rank for itself
  kLeader,    ///< this rank decides and publishes
  kFollower,  ///< this rank runs what the leader published
};

/// Lets the contexts of a rank take turns: exactly one holds the baton and
/// runs. There is no scheduling thread: whoever frees the baton, or makes a
/// context ready while it is free, asks the policy and wakes the chosen one.
class Scheduler {
 public:
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

  struct Stats {
    int64_t idle_ns = 0;       ///< within steps, while no context could run
    int64_t num_contexts = 0;  ///< started
    int64_t num_switches = 0;  ///< baton passed to another context
  };

  /// Called under the scheduler's mutex: must not block nor call back.
  using OrderSink = std::function<void(int64_t step, const TaskKey&)>;
  using ErrorSink =
      std::function<void(const Context&, const std::exception_ptr&)>;

  /// @param timeline  records who has the baton and who waits; may be null
  /// @param mailbox  waiting contexts receive its messages; may be null
  Scheduler(ContextThreads* threads, c10::Device device,
            Timeline* timeline = nullptr, mailbox::Mailbox* mailbox = nullptr);

  void set_order_sink(OrderSink sink) { order_sink_ = std::move(sink); }
  /// Called in the thread of a context whose work raised, before cancelling.
  void set_error_sink(ErrorSink sink) { error_sink_ = std::move(sink); }
  /// Called without locks when the last context has ended or was cancelled.
  void set_idle_sink(std::function<void()> sink) {
    idle_sink_ = std::move(sink);
  }

  /// Opens a step; contexts may be added from now on.
  void begin_step(const StepOptions& options);
  /// Closes a step in which all contexts have ended. @throws InternalError
  void end_step();

  /// Adds the body of one microbatch: it starts when `active_microbatches`
  /// allows, in order of `mb`.
  void add_body(int mb, std::string where, uint64_t seed,
                std::function<void()> work);
  /// Adds a service context, ready at once.
  void add_service(const TaskKey& key, std::string where, uint64_t seed,
                   std::function<void()> work);

  /// Called by a running context: gives the baton back until `slot` is filled.
  /// @throws PeerFailure when the step is cancelled meanwhile
  mailbox::Message wait(Slot& slot, const char* waits_for, int waits_for_rank);
  /// Called by the context of a step body when its phase changes: the policy
  /// may let others go first.
  void enter_phase(Phase phase);
  /// Fills a slot from any thread.
  void fill(Slot& slot, mailbox::Message message);

  /// Ends the step early: every waiting context raises `reason`, contexts not
  /// yet started never start. First reason wins; from any thread.
  void cancel(std::exception_ptr reason);

  /// Adds the next task that the leader published.
  void add_agreed(int64_t step, const TaskKey& key);

  /// Nothing of a microbatch is kept on any rank any more.
  void end_microbatch(int64_t mb);
  /// An action of the schedule has nothing to do here.
  void skip_action(const Action& action);
  /// Starts the best of the ready tasks although the policy waits for another
  /// one. @return what was started; empty if nothing is held back or an agreed
  ///     order counts
  std::string run_held_back();
  /// The longest time for which a context held the baton.
  std::chrono::nanoseconds longest_turn() const;

  /// Waits until all bodies and services have ended or the step is cancelled.
  /// @return true when it has ended, cancelled or not; false after `timeout`.
  bool wait_until_idle(std::chrono::milliseconds timeout);
  bool is_idle() const;
  /// Null unless the step was cancelled.
  std::exception_ptr cancel_reason() const;

  bool baton_is_free() const;
  /// Global ranks whose answers suspended contexts wait for.
  std::vector<int> awaited_ranks() const;
  /// One line per context that has not ended, for timeouts.
  std::string describe() const;
  Stats stats() const;
  /// Tasks in the order in which they first ran in the last step.
  std::vector<TaskKey> executed_order() const;
  /// The last step in the text form of a schedule. The driver's backward stands
  /// where its own gradients came, and not where it asked others for theirs.
  std::string executed_actions() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  void add_locked(std::unique_ptr<Context> context);
  void make_ready_locked(Context* context);
  Context* choose_locked();
  std::vector<ReadyTask> ready_tasks_locked() const;
  std::optional<size_t> find_agreed_locked(const std::vector<ReadyTask>& tasks);
  std::optional<size_t> pick_locked(const std::vector<ReadyTask>& tasks) const;
  Context* take_locked(size_t choice);
  void switch_to_locked(Context* chosen);
  std::optional<Action> action_of(const Context& context) const;
  void dispatch_locked();
  void start_locked(Context* context);
  bool is_recorded() const { return timeline_ && timeline_->is_on(); }
  void end_turn_locked();
  void release_baton_locked();
  void wait_for_baton(Lock& lock, Context* context);
  void resume_locked(Context& context);
  void run_context(Context* context);
  Context* finish(Context* context);
  void own_generators_locked(Context* context);
  StepProgress progress_locked() const;
  void throw_if_cancelled_locked() const;
  bool body_may_start_locked() const;

  ContextThreads* const threads_;
  const c10::Device device_;
  Timeline* const timeline_;
  mailbox::Mailbox* const mailbox_;
  OrderSink order_sink_;
  ErrorSink error_sink_;
  std::function<void()> idle_sink_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  StepOptions options_;
  bool in_step_ = false;
  std::unordered_map<Context*, std::unique_ptr<Context>> contexts_;
  std::vector<Context*> ready_;
  std::deque<Context*> bodies_to_start_;
  int num_bodies_added_ = 0;
  int num_bodies_in_flight_ = 0;
  std::deque<std::pair<int64_t, TaskKey>> agreed_;
  Context* running_ = nullptr;
  Context* generators_owner_ = nullptr;
  int64_t next_arrival_ = 0;
  std::exception_ptr cancel_reason_;
  std::vector<TaskKey> executed_;
  schedule::ExecutedOrder order_;
  std::optional<Action> last_action_;
  std::vector<int64_t> ended_microbatches_;
  std::chrono::nanoseconds longest_turn_{0};
  std::chrono::steady_clock::time_point turn_began_;
  Stats stats_;
  std::chrono::steady_clock::time_point idle_since_;
};

}  // namespace smp::pipeline
