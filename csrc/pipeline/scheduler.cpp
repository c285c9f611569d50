#include "csrc/pipeline/scheduler.h"

#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/task_scope.h"
#include "csrc/memory/device_scope.h"

namespace smp::pipeline {
namespace {

// Reason of a context that only waits for the baton.
const char* const kItsTurn = "its turn";
// Reason of a context that only waits until the device has room.
const char* const kBusyDevice = "the device, which had enough to do";

}  // namespace

Scheduler::Scheduler(ContextThreads* threads, c10::Device device,
                     Timeline* timeline, mailbox::Mailbox* mailbox,
                     std::shared_ptr<memory::DeviceMeter> meter)
    : threads_(threads),
      mailbox_(mailbox),
      device_(device),
      baton_(timeline),
      run_ahead_(device, std::move(meter), [this] {
        const Lock lock(mutex_);
        dispatch_locked();
      }) {
  threads_->set_idle_probe([this] { return baton_is_free(); });
}

void Scheduler::begin_step(const StepOptions& options) {
  Lock lock(mutex_);
  SMP_ASSERT(!in_step_ && contexts_.empty(), "begin_step inside a step");
  choice_.begin_step(options);
  in_step_ = true;
  device_.begin_step();
  cancel_reason_ = nullptr;
  baton_.begin_step(options.step, options.num_microbatches);
}

void Scheduler::end_step() {
  Lock lock(mutex_);
  SMP_ASSERT(contexts_.empty() && !baton_.holder(),
             "a step ended with work left: ", contexts_.size(), " contexts");
  if (in_step_) baton_.end_step();
  in_step_ = false;
}

void Scheduler::add_body(int mb, std::string where, uint64_t seed,
                         std::function<void()> work) {
  auto context = std::make_unique<Context>();
  context->key = {Phase::kForward, mb, TaskKey::kStepBody, 0, 0};
  context->where = std::move(where);
  context->seed = seed;
  context->work = std::move(work);
  Lock lock(mutex_);
  if (cancel_reason_) return;
  choice_.add_body(context.get());
  add_locked(std::move(context));
}

void Scheduler::add_service(const TaskKey& key, std::string where,
                            uint64_t seed, std::function<void()> work) {
  auto context = std::make_unique<Context>();
  context->key = key;
  context->where = std::move(where);
  context->seed = seed;
  context->work = std::move(work);
  Lock lock(mutex_);
  if (cancel_reason_) return;
  choice_.add_ready(context.get());
  add_locked(std::move(context));
}

void Scheduler::add_locked(std::unique_ptr<Context> context) {
  Context* key = context.get();
  contexts_.emplace(key, std::move(context));
  dispatch_locked();
}

void Scheduler::make_ready_locked(Context* context) {
  context->state = Context::State::kReady;
  choice_.add_ready(context);
}

void Scheduler::end_backward(int64_t mb) {
  Lock lock(mutex_);
  choice_.end_backward(mb);
  dispatch_locked();
}

void Scheduler::end_microbatch(int64_t mb) {
  Lock lock(mutex_);
  choice_.end_microbatch(mb);
  dispatch_locked();
}

void Scheduler::skip_action(const Action& action) {
  Lock lock(mutex_);
  choice_.skip_action(action);
  dispatch_locked();
}

void Scheduler::dispatch_locked() {
  if (baton_.holder() || !in_step_ || cancel_reason_) return;
  if (Context* chosen = take_next_locked()) switch_to_locked(chosen);
}

// Makes a choice when the device needs it, with all tasks that have come by
// then. Does not wait: the baton stays free, and messages come in.
Context* Scheduler::take_next_locked() {
  if (!choice_.is_bound_by_device() || !run_ahead_.is_full()) {
    return choice_.take_next();
  }
  Context* next = choice_.take_at_once();
  if (!next && choice_.has_choice()) run_ahead_.call_when_free();
  return next;
}

void Scheduler::switch_to_locked(Context* chosen) {
  if (begin_turn_locked(chosen)) {
    threads_->run([this, chosen] { run_context(chosen); });
  } else {
    resume_locked(*chosen);
  }
}

bool Scheduler::begin_turn_locked(Context* chosen) {
  const bool was_held = run_ahead_.begin_turn(choice_.note_turn(*chosen));
  return baton_.give_to(chosen, was_held ? kBusyDevice : nullptr);
}

void Scheduler::release_baton_locked() {
  baton_.take_back();
  dispatch_locked();
}

void Scheduler::throw_if_cancelled_locked() const {
  // The reason itself is not raised: a Python exception can be raised in one
  // thread only.
  SMP_THROW_IF_NOT(PeerFailure, !cancel_reason_,
                   "this step was cancelled after a failure elsewhere");
}

// Waits for the baton. A thread that receives its own messages needs no other
// thread to wake it.
void Scheduler::wait_for_baton(Lock& lock, Context* context) {
  const auto done = [&] {
    return context->state == Context::State::kRunning || cancel_reason_;
  };
  // The bodies of other ranks wait for the driver all the time. On those ranks
  // the threads that serve requests receive the messages.
  const bool follows = !choice_.options().is_driver &&
                       context->key.module_id == TaskKey::kStepBody;
  if (mailbox_ != nullptr && !follows && !done()) {
    context->is_helping = true;
    lock.unlock();
    {
      const TaskScope no_task(Task{});  // handlers belong to no context
      set_current_context(nullptr);
      mailbox_->help_until(
          [&] {
            Lock inner(mutex_);
            return done();
          },
          [this] { return baton_is_free(); });
      set_current_context(context);
    }
    lock.lock();
    context->is_helping = false;
  }
  context->resumed.wait(lock, done);
}

void Scheduler::resume_locked(Context& context) {
  context.resumed.notify_one();
  if (context.is_helping) mailbox_->wake_helper();
}

mailbox::Message Scheduler::wait(Slot& slot, const char* waits_for,
                                 int waits_for_rank) {
  Context* context = current_context();
  SMP_ASSERT(context, "wait outside a context");
  run_ahead_.mark();
  Lock lock(mutex_);
  throw_if_cancelled_locked();
  // Under an agreed order every wait is a turn, whether or not the answer was
  // there already: otherwise peers would count resumptions differently.
  if (slot.message && choice_.options().order == OrderRole::kFree) {
    return std::move(*slot.message);
  }
  ++context->key.resume;
  if (slot.message) {
    make_ready_locked(context);
  } else {
    baton_.note_wait(*context, waits_for, waits_for_rank);
    slot.waiter = context;
  }
  release_baton_locked();
  wait_for_baton(lock, context);
  slot.waiter = nullptr;
  throw_if_cancelled_locked();
  device_.give_generators_to(*context);
  return std::move(*slot.message);
}

void Scheduler::enter_phase(Phase phase) {
  Context* context = current_context();
  SMP_ASSERT(context, "enter_phase outside a context");
  run_ahead_.mark();
  Lock lock(mutex_);
  throw_if_cancelled_locked();
  if (context->key.phase == phase) return;
  context->key.phase = phase;
  if (phase == Phase::kBackward && choice_.may_begin_backward(kItsTurn)) {
    ++context->key.resume;
    baton_.begin_next_task(kItsTurn);
    return;
  }
  ++context->key.resume;
  context->waits_for = kItsTurn;
  context->waits_for_rank = -1;
  make_ready_locked(context);
  release_baton_locked();
  wait_for_baton(lock, context);
  throw_if_cancelled_locked();
  device_.give_generators_to(*context);
}

void Scheduler::fill(Slot& slot, mailbox::Message message) {
  Lock lock(mutex_);
  slot.message = std::move(message);
  if (slot.waiter && slot.waiter->state == Context::State::kSuspended) {
    baton_.note_answer(*slot.waiter);
    make_ready_locked(slot.waiter);
    dispatch_locked();
  }
}

void Scheduler::cancel(std::exception_ptr reason) {
  // Contexts end without the lock: their work may hold graphs and Python
  // objects.
  std::vector<std::unique_ptr<Context>> dropped;
  Lock lock(mutex_);
  if (!in_step_ || cancel_reason_) return;
  cancel_reason_ = std::move(reason);
  for (auto it = contexts_.begin(); it != contexts_.end();) {
    if (it->first->state == Context::State::kNotStarted) {
      dropped.push_back(std::move(it->second));
      it = contexts_.erase(it);
    } else {
      resume_locked(*it->first);
      ++it;
    }
  }
  choice_.clear();
  idle_.notify_all();
}

void Scheduler::add_agreed(int64_t step, const TaskKey& key) {
  Lock lock(mutex_);
  choice_.add_agreed(step, key);
  dispatch_locked();
}

void Scheduler::run_context(Context* context) {
  while (context) {
    // The device is set for each context: a body may leave another one current.
    const memory::DeviceScope place(stream());
    set_current_context(context);
    keep_backward_on_this_thread();
    try {
      TaskScope scope(
          {choice_.options().step, static_cast<int>(context->key.mb)});
      {
        Lock lock(mutex_);
        device_.give_generators_to(*context);
      }
      context->work();
      run_ahead_.mark();
    } catch (...) {
      std::exception_ptr error = std::current_exception();
      if (error_sink_) error_sink_(*context, error);
      cancel(error);
    }
    context->work = nullptr;  // without the lock: it may own Python objects
    set_current_context(nullptr);
    context = finish(context);
  }
}

// Ends a context. If the policy chooses a context that has no thread yet, the
// calling thread gets it, which saves a wake-up.
Context* Scheduler::finish(Context* context) {
  Lock lock(mutex_);
  context->state = Context::State::kDone;
  device_.forget(*context);
  choice_.note_end(*context);
  const bool held_baton = baton_.holder() == context;
  contexts_.erase(context);
  Context* next = nullptr;
  if (held_baton) {
    baton_.take_back();
    if (in_step_ && !cancel_reason_) next = take_next_locked();
  }
  if (next && !begin_turn_locked(next)) {
    resume_locked(*next);
    next = nullptr;
  }
  if (contexts_.empty()) {
    idle_.notify_all();
    lock.unlock();
    if (idle_sink_) idle_sink_();
  }
  return next;
}

std::string Scheduler::run_held_back() {
  Lock lock(mutex_);
  if (baton_.holder() || !in_step_ || cancel_reason_) return {};
  // In this case the policy has not even been asked.
  if (choice_.is_bound_by_device() && run_ahead_.is_full()) return {};
  Context* chosen = choice_.take_held_back();
  if (!chosen) return {};
  std::string what = chosen->where;
  switch_to_locked(chosen);
  return what;
}

bool Scheduler::is_idle() const {
  Lock lock(mutex_);
  return contexts_.empty();
}

bool Scheduler::wait_until_idle(std::chrono::milliseconds timeout) {
  Lock lock(mutex_);
  return idle_.wait_for(lock, timeout, [this] { return contexts_.empty(); });
}

std::exception_ptr Scheduler::cancel_reason() const {
  Lock lock(mutex_);
  return cancel_reason_;
}

int64_t Scheduler::num_due_turns() const {
  Lock lock(mutex_);
  return choice_.num_due_turns();
}

bool Scheduler::baton_is_free() const {
  Lock lock(mutex_);
  return baton_.holder() == nullptr;
}

std::optional<c10::Stream> Scheduler::stream() const {
  Lock lock(mutex_);
  return device_.stream();
}

std::vector<int> Scheduler::awaited_ranks() const {
  Lock lock(mutex_);
  std::vector<int> ranks;
  for (const auto& [context, owned] : contexts_) {
    if (context->state == Context::State::kSuspended &&
        context->waits_for_rank >= 0) {
      ranks.push_back(context->waits_for_rank);
    }
  }
  return ranks;
}

std::string Scheduler::describe() const {
  Lock lock(mutex_);
  std::string text;
  for (const auto& [context, owned] : contexts_) {
    if (!text.empty()) text += "; ";
    text += to_string(*context);
  }
  return text.empty() ? "nothing to run" : text;
}

Scheduler::Stats Scheduler::stats() const {
  Lock lock(mutex_);
  return baton_.stats();
}

std::chrono::nanoseconds Scheduler::longest_turn() const {
  Lock lock(mutex_);
  return baton_.longest_turn();
}

std::string Scheduler::executed_actions() const {
  Lock lock(mutex_);
  return choice_.executed_actions();
}

std::vector<TaskKey> Scheduler::executed_order() const {
  Lock lock(mutex_);
  return choice_.executed();
}

}  // namespace smp::pipeline
