#include "csrc/pipeline/steps.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/memory/device_scope.h"
#include "csrc/memory/random_state.h"

namespace smp::pipeline {

Steps::Steps(const ServerOptions& options, Parts parts,
             std::shared_ptr<mailbox::Mailbox> mailbox,
             std::shared_ptr<health::FaultBoard> faults)
    : options_(options),
      parts_(parts),
      faults_(faults),
      wait_(options, std::move(mailbox), std::move(faults), parts.scheduler) {}

void Steps::set_listeners(Listeners listeners) {
  std::lock_guard<std::mutex> lock(mutex_);
  listeners_.swap(listeners);
}

void Steps::set_microbatch_done(std::function<void(int mb)> done) {
  microbatch_done_ = std::move(done);
}

void Steps::close() {
  Listeners listeners;  // end without the lock
  const auto done = std::exchange(microbatch_done_, {});
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  listeners.swap(listeners_);
}

void Steps::wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

// ---------------------------------------------------------------- messages

void Steps::receive(mailbox::Message&& message) {
  const std::shared_lock handling(handling_);
  const Header header = parts_.messenger.open(message);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (header.kind == Kind::kStepBegin) {
      begins_[header.step] = std::move(message);
      changed_.notify_all();
      return;
    }
    if (!in_step_ || header.step != parts_.messenger.step()) {
      early_.push_back(std::move(message));
      return;
    }
  }
  dispatch(header, std::move(message));
}

// Handles a message. Not under the mutex, because it frees graphs and adds
// gradients. Whichever thread brings the message, tensors are sent and added
// behind the work that has computed them.
void Steps::dispatch(const Header& header, mailbox::Message&& message) {
  const memory::DeviceScope place(parts_.scheduler.stream());
  switch (header.kind) {
    case Kind::kForwardRequest:
    case Kind::kBackwardRequest:
    case Kind::kOperation:
      return parts_.callee.take(header, std::move(message));
    case Kind::kForwardMeta:
    case Kind::kBackwardMeta:
    case Kind::kRequestsDone:
      return parts_.caller.take(header, std::move(message));
    case Kind::kPush:
    case Kind::kRelease:
    case Kind::kData:
      return parts_.tensors.take(header, std::move(message));
    case Kind::kModelOutput:
    case Kind::kBackwardDone:
      return parts_.announcements.take(header, std::move(message));
    case Kind::kBodyDone:
      return end_body(static_cast<int>(header.mb));
    case Kind::kMicrobatchEnd:
      return take_end(static_cast<int>(header.mb));
    case Kind::kStepEnd:
      end_seen_ = true;
      return wake();
    case Kind::kStepBegin:
      return;  // taken by receive
  }
}

// Handles messages that came before this rank's script was ready, in their
// order, and then opens the gate: newer ones must not overtake them.
void Steps::take_early_messages() {
  std::deque<mailbox::Message> later;
  while (true) {
    mailbox::Message message;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (early_.empty()) {
        early_.swap(later);
        in_step_ = true;
        return;
      }
      message = std::move(early_.front());
      early_.pop_front();
    }
    const Header header = Header::read_from(message);
    if (header.step == parts_.messenger.step()) {
      dispatch(header, std::move(message));
    } else if (header.step > parts_.messenger.step()) {
      later.push_back(std::move(message));
    }
  }
}

// ------------------------------------------------------------------- steps

Steps::StepStart Steps::begin(const std::string& name, int num_microbatches,
                              const std::string& words) {
  faults_->raise_if_faulted();
  Messenger& messenger = parts_.messenger;
  Lock lock(mutex_);
  SMP_ASSERT(!in_step_ && !closed_, "begin_step inside a step");
  const int64_t step = messenger.step() + 1;
  messenger.set_step(step);
  end_seen_ = false;
  num_microbatches_ended_ = 0;
  bodies_done_.clear();
  lock.unlock();
  parts_.tensors.begin_step();
  parts_.callee.begin_step();
  parts_.weights.begin_step();
  if (is_driver()) {
    Header header = messenger.header_of(Kind::kStepBegin, 0);
    header.index = num_microbatches;
    messenger.post_to_others(header, name + '\0' + words);
    return {num_microbatches, words};
  }
  lock.lock();
  wait_until(lock, [this, step] { return begins_.count(step) > 0; });
  const mailbox::Message begin = std::move(begins_[step]);
  begins_.erase(step);
  const auto end_of_name = std::min(begin.bytes.find('\0'), begin.bytes.size());
  SMP_CHECK(begin.bytes.compare(0, end_of_name, name) == 0, "step call ", step,
            " runs '", name, "' here but '", begin.bytes.substr(0, end_of_name),
            "' on global_rank ", messenger.driver_rank(),
            "; all ranks must call the same step functions in one order");
  const auto begin_of_words = std::min(end_of_name + 1, begin.bytes.size());
  return {static_cast<int>(Header::read_from(begin).index),
          begin.bytes.substr(begin_of_words)};
}

void Steps::run(int num_microbatches, uint64_t seed,
                std::function<void(int mb)> body) {
  // Bodies go on under the caller's grad mode, autocast and inference mode.
  const auto state = std::make_shared<at::ThreadLocalState>();
  const auto shared_body =
      std::make_shared<std::function<void(int)>>(std::move(body));
  parts_.scheduler.begin_step(step_options(num_microbatches));
  for (int mb = 0; mb < num_microbatches; ++mb) {
    parts_.scheduler.add_body(mb, "step body, microbatch " + std::to_string(mb),
                              memory::mix_seed(seed, static_cast<uint64_t>(mb)),
                              [this, mb, state, shared_body] {
                                at::ThreadLocalStateGuard guard(*state);
                                run_body(mb, *shared_body);
                              });
  }
  std::exception_ptr failure;
  try {
    take_early_messages();
    failure = await_end(num_microbatches);
  } catch (...) {  // a damaged message, a fault, a time-out, Ctrl-C
    failure = std::current_exception();
  }
  if (failure) abandon(failure);
  parts_.scheduler.end_step();
  if (is_driver()) {
    parts_.messenger.post_to_others(
        parts_.messenger.header_of(Kind::kStepEnd, 0));
  }
}

void Steps::run_body(int mb, const std::function<void(int)>& body) {
  keep_backward_on_this_thread();
  body(mb);
  parts_.caller.finish(*current_context());
  // The driver ends the microbatch when it is over on all ranks: until then
  // they may ask for what was published.
  if (is_driver()) {
    end_body(mb);
  } else {
    parts_.messenger.post(parts_.messenger.driver_rank(),
                          parts_.messenger.header_of(Kind::kBodyDone, mb));
  }
}

void Steps::begin_backward() {
  calling_context("backward");
  parts_.scheduler.enter_phase(Phase::kBackward);
}

// Closes the step. Returns null unless it was cancelled.
std::exception_ptr Steps::await_end(int num_microbatches) {
  Lock lock(mutex_);
  wait_until(lock, [this, num_microbatches] {
    if (!parts_.scheduler.is_idle()) return false;
    if (parts_.scheduler.cancel_reason()) return true;
    return is_driver() ? num_microbatches_ended_ == num_microbatches
                       : end_seen_.load();
  });
  const std::exception_ptr failure = parts_.scheduler.cancel_reason();
  if (!failure) in_step_ = false;
  return failure;
}

StepOptions Steps::step_options(int num_microbatches) const {
  const Policy& policy = parts_.policy;
  const int num_partitions = static_cast<int>(options_.pp_ranks.size());
  StepOptions step;
  step.policy = &policy;
  step.num_microbatches = num_microbatches;
  const int active = options_.active_microbatches > 0
                         ? options_.active_microbatches
                         : policy.default_active_microbatches(num_partitions,
                                                              num_microbatches);
  step.active_microbatches = std::min(active, num_microbatches);
  step.is_driver = is_driver();
  if (options_.has_order()) {
    step.order =
        options_.leads_order() ? OrderRole::kLeader : OrderRole::kFollower;
  }
  step.step = parts_.messenger.step();
  step.num_partitions = num_partitions;
  step.num_chunks = options_.num_chunks;
  step.depth = parts_.modules.depth();
  step.chunk_idxs = &parts_.modules.chunk_idxs();
  // Limits count on a chain, which several models are not.
  step.lets_wait = parts_.modules.num_models() <= 1 &&
                   policy.limits_forwards(at::GradMode::is_enabled());
  return step;
}

// Ends all contexts after a failure and raises it. The first reason counts: a
// context's own exception comes before the failures that it caused.
void Steps::abandon(std::exception_ptr failure) {
  Scheduler& scheduler = parts_.scheduler;
  scheduler.cancel(failure);
  scheduler.wait_until_idle(options_.unwind_timeout);
  failure = scheduler.cancel_reason();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    in_step_ = false;
  }
  // Work of a message that is being handled must not come after the clearing.
  {
    const std::unique_lock none_is_handled(handling_);
  }
  parts_.announcements.clear();
  parts_.caller.clear();
  parts_.callee.clear();
  parts_.tensors.clear();
  if (scheduler.is_idle()) scheduler.end_step();
  std::rethrow_exception(failure);
}

// ------------------------------------------------------------ microbatches

// Driver: notes that a body is over, here or on another rank.
void Steps::end_body(int mb) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (++bodies_done_[mb] < static_cast<int>(options_.pp_ranks.size())) return;
  }
  parts_.messenger.post_to_others(
      parts_.messenger.header_of(Kind::kMicrobatchEnd, mb));
  take_end(mb);
  std::lock_guard<std::mutex> lock(mutex_);
  ++num_microbatches_ended_;
  changed_.notify_all();
}

// Takes the end of a microbatch, which a message brings at any time. Gradients
// that waited for it are then sent to their sums. On a device these have to lie
// between the same gathers of parameters on all replicas: where replicas follow
// one order, the end of a microbatch is a task in it.
void Steps::take_end(int mb) {
  if (!options_.has_order()) return finish_microbatch(mb);
  parts_.scheduler.add_service({Phase::kBackward, mb, kMicrobatchEndId, 0, 0},
                               "the end of microbatch " + std::to_string(mb),
                               /*seed=*/0,
                               [this, mb] { finish_microbatch(mb); });
}

void Steps::finish_microbatch(int mb) {
  // Forwards may wait for this end, and gradients of weights for those
  // forwards.
  parts_.scheduler.end_backward(mb);
  if (parts_.weights.puts_off_end(mb)) return;
  parts_.announcements.end_microbatch(mb);
  parts_.callee.end_microbatch(mb);
  parts_.tensors.end_microbatch(mb);
  notify_end(mb);
  parts_.scheduler.end_microbatch(mb);
}

void Steps::notify_end(int mb) {
  Listeners listeners;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    listeners = listeners_;
  }
  for (const auto& listener : listeners) listener->on_microbatch_end(mb);
  if (microbatch_done_) microbatch_done_(mb);
}

// ------------------------------------------------------------------- waits

void Steps::wait_until(Lock& lock, const std::function<bool()>& is_over) {
  wait_.until(lock, changed_,
              {.is_over = is_over,
               .ranks_needed = [this] { return ranks_needed(); },
               .describe = [this] { return describe_wait(); }});
}

// Returns the ranks without which the wait cannot end. Other ranks may have
// left: they are done.
std::vector<int> Steps::ranks_needed() const {
  std::vector<int> ranks = parts_.scheduler.awaited_ranks();
  if (!is_driver() && !end_seen_) {
    ranks.push_back(parts_.messenger.driver_rank());
  }
  if (is_driver() && in_step_ && parts_.scheduler.is_idle()) {
    for (const int rank : options_.pp_ranks) {
      if (rank != options_.global_rank) ranks.push_back(rank);
    }
  }
  return ranks;
}

std::string Steps::describe_wait() const {
  std::string text =
      "step call " + std::to_string(parts_.messenger.step()) + ": ";
  const std::string queued = parts_.callee.describe_queued();
  if (!queued.empty()) text += queued + "; ";
  if (!parts_.scheduler.is_idle()) return text + parts_.scheduler.describe();
  if (is_driver()) return text + "waiting for the bodies of other ranks";
  return text + "waiting for global_rank " +
         std::to_string(parts_.messenger.driver_rank()) +
         (in_step_ ? " to end it" : " to begin it");
}

}  // namespace smp::pipeline
