#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/mailbox/mailbox.h"
#include "csrc/memory/device_meter.h"
#include "csrc/pipeline/baton.h"
#include "csrc/pipeline/context_threads.h"
#include "csrc/pipeline/device_run_ahead.h"
#include "csrc/pipeline/step_device.h"
#include "csrc/pipeline/task_choice.h"

namespace smp::pipeline {

/// Lets the contexts of a rank take turns: exactly one holds the baton and
/// runs. There is no scheduling thread: a thread that frees the baton, or makes
/// a context ready while it is free, asks the policy and wakes the chosen one.
class Scheduler {
 public:
  using Stats = Baton::Stats;
  using ErrorSink =
      std::function<void(const Context&, const std::exception_ptr&)>;

  /// @param timeline  records turns and waits of contexts; may be null
  /// @param mailbox  waiting contexts receive its messages; may be null
  /// @param meter  shows what the device has to do (DeviceRunAhead), or null
  Scheduler(ContextThreads* threads, c10::Device device,
            Timeline* timeline = nullptr, mailbox::Mailbox* mailbox = nullptr,
            std::shared_ptr<memory::DeviceMeter> meter = nullptr);

  /// Sets a function that is called under the mutex.
  void set_order_sink(TaskChoice::OrderSink sink) {
    choice_.set_order_sink(std::move(sink));
  }
  /// Sets a function that is called in the thread of a context whose work
  /// raised, before cancelling.
  void set_error_sink(ErrorSink sink) { error_sink_ = std::move(sink); }
  /// Sets a function that is called without locks when the last context has
  /// ended or was cancelled.
  void set_idle_sink(std::function<void()> sink) {
    idle_sink_ = std::move(sink);
  }

  /// Opens a step; contexts may be added from now on. They work on the device
  /// of this rank, in the order of the caller's current stream.
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

  /// Gives the baton back until `slot` is filled; called by a running context.
  /// @throws PeerFailure when the step is cancelled meanwhile
  mailbox::Message wait(Slot& slot, const char* waits_for, int waits_for_rank);
  /// Changes the phase of a step body; called by its context. The policy may
  /// let others go first.
  void enter_phase(Phase phase);
  /// Fills a slot from any thread.
  void fill(Slot& slot, mailbox::Message message);

  /// Ends the step early: every waiting context raises `reason`, and contexts
  /// not yet started never start. The first reason wins; from any thread.
  void cancel(std::exception_ptr reason);

  /// Adds the next task that the leader published.
  void add_agreed(int64_t step, const TaskKey& key);

  /// Notes that no module of a microbatch has a backward to come, on any rank.
  /// Delayed gradients of weights may still come.
  void end_backward(int64_t mb);
  /// Notes that no rank keeps anything of a microbatch any more.
  void end_microbatch(int64_t mb);
  /// Skips an action of the schedule that has nothing to do here.
  void skip_action(const Action& action);
  /// Starts the best of the ready tasks although the policy waits for another
  /// one. @return name of the started task; empty if nothing is held back or an
  /// agreed order counts
  std::string run_held_back();
  std::chrono::nanoseconds longest_turn() const;  ///< with the baton

  /// Waits until all bodies and services have ended or the step is cancelled.
  /// @return true when it has ended, cancelled or not; false after `timeout`.
  bool wait_until_idle(std::chrono::milliseconds timeout);
  bool is_idle() const;
  /// Returns the reason if the step was cancelled, else null.
  std::exception_ptr cancel_reason() const;

  bool baton_is_free() const;
  /// Returns the number of turns, except those of tasks that `run_held_back`
  /// has begun: these do not bring what this rank waits for.
  int64_t num_due_turns() const;
  /// Returns the stream on which contexts of the open step use the device, as
  /// do threads that bring messages for them; none on the CPU.
  std::optional<c10::Stream> stream() const;
  /// Returns the global ranks whose answers suspended contexts wait for.
  std::vector<int> awaited_ranks() const;
  /// Returns one line per context that has not ended, for timeouts.
  std::string describe() const;
  Stats stats() const;
  /// Returns the tasks in the order in which they first ran in the last step.
  std::vector<TaskKey> executed_order() const;
  /// Returns the last step in the text form of a schedule. The driver's
  /// backward is listed where its own gradients came, not where it asked others
  /// for theirs.
  std::string executed_actions() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  void add_locked(std::unique_ptr<Context> context);
  void make_ready_locked(Context* context);
  Context* take_next_locked();
  void switch_to_locked(Context* chosen);
  void dispatch_locked();
  bool begin_turn_locked(Context* chosen);
  void release_baton_locked();
  void wait_for_baton(Lock& lock, Context* context);
  void resume_locked(Context& context);
  void run_context(Context* context);
  Context* finish(Context* context);
  void throw_if_cancelled_locked() const;

  ContextThreads* const threads_;
  mailbox::Mailbox* const mailbox_;
  ErrorSink error_sink_;
  std::function<void()> idle_sink_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  TaskChoice choice_;
  bool in_step_ = false;
  std::unordered_map<Context*, std::unique_ptr<Context>> contexts_;
  StepDevice device_;
  Baton baton_;
  std::exception_ptr cancel_reason_;
  DeviceRunAhead run_ahead_;  // its thread uses all members above
};

}  // namespace smp::pipeline
