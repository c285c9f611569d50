#include "csrc/pipeline/server.h"

#include <ATen/ThreadLocalState.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "csrc/comm/fault_aware_wait.h"
#include "csrc/common/check.h"
#include "csrc/memory/random_state.h"

namespace smp::pipeline {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{200};

}  // namespace

Server::Server(Options options, std::shared_ptr<comm::Mailbox> mailbox,
               std::shared_ptr<comm::FaultBoard> faults,
               ContextThreads::Enter thread_enter)
    : options_(std::move(options)),
      mailbox_(std::move(mailbox)),
      faults_(std::move(faults)),
      policy_(schedule::make_policy(options_.policy)),
      threads_(std::move(thread_enter)),
      scheduler_(&threads_, options_.device) {
  const auto& ranks = options_.pp_ranks;
  const auto found =
      std::find(ranks.begin(), ranks.end(), options_.global_rank);
  SMP_ASSERT(found != ranks.end(), "rank outside of its pipeline group");
  pp_rank_ = static_cast<int>(found - ranks.begin());
  scheduler_.set_error_sink(
      [this](const Context& context, const std::exception_ptr& error) {
        on_context_error(context, error);
      });
  scheduler_.set_idle_sink([this] {
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  });
  if (options_.deterministic && options_.order_ranks.size() > 1 &&
      options_.order_ranks.front() == options_.global_rank) {
    scheduler_.set_order_sink([this](int64_t step, const TaskKey& key) {
      for (const int peer : options_.order_ranks) {
        if (peer == options_.global_rank) continue;
        comm::Message message;
        message.channel = comm::Channel::kOrder;
        message.fields = {step,      static_cast<int64_t>(key.phase),
                          key.mb,    key.module_id,
                          key.visit, key.resume};
        mailbox_->post(peer, std::move(message));
      }
    });
  }
  fault_subscription_ = faults_->subscribe([this] { on_fault(); });
  mailbox_->set_handler(
      comm::Channel::kPipeline,
      [this](comm::Message&& message) { on_message(std::move(message)); });
  mailbox_->set_handler(comm::Channel::kOrder, [this](comm::Message&& message) {
    const auto& f = message.fields;
    scheduler_.add_agreed(f[0],
                          {static_cast<Phase>(f[1]), f[2], f[3], f[4], f[5]});
  });
}

Server::~Server() { close(); }

void Server::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  mailbox_->set_handler(comm::Channel::kPipeline, {});
  mailbox_->set_handler(comm::Channel::kOrder, {});
  faults_->unsubscribe(fault_subscription_);
  threads_.join();
  records_.clear();
  // They refer to the model, which refers to this server.
  forward_handler_ = {};
  error_reporter_ = {};
  microbatch_done_ = {};
}

void Server::set_forward_handler(ForwardHandler handler) {
  forward_handler_ = std::move(handler);
}

void Server::set_error_reporter(ErrorReporter reporter) {
  error_reporter_ = std::move(reporter);
}

void Server::set_microbatch_done(MicrobatchDone done) {
  microbatch_done_ = std::move(done);
}

// ---------------------------------------------------------------- messages

void Server::post(int dst, const Header& header, const std::string& structure,
                  std::vector<comm::MessageTensor> tensors) {
  comm::Message message;
  Header sent = header;
  const auto [id, with_bytes] = structures_.on_send(dst, structure);
  sent.structure_id = id;
  sent.write_to(message);
  if (with_bytes) message.bytes = structure;
  message.tensors = std::move(tensors);
  mailbox_->post(dst, std::move(message));
}

void Server::post_to_others(const Header& header) {
  for (const int rank : options_.pp_ranks) {
    if (rank != options_.global_rank) post(rank, header, {}, {});
  }
}

void Server::on_message(comm::Message&& message) {
  try {
    take_message(std::move(message));
  } catch (...) {
    scheduler_.cancel(std::current_exception());
    throw;  // the mailbox tells the others
  }
}

void Server::take_message(comm::Message&& message) {
  const Header header = Header::read_from(message);
  // In the order of arrival, so that an id never precedes its bytes.
  message.bytes = structures_.on_receive(
      message.source_rank, header.structure_id, std::move(message.bytes));
  std::vector<std::function<void()>> after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (header.kind == Kind::kStepBegin) {
      step_begins_[header.step] = std::move(message);
      changed_.notify_all();
    } else if (!in_step_ || header.step != step_) {
      early_.push_back(std::move(message));
    } else {
      handle_locked(header, std::move(message), after);
    }
  }
  // Frees graphs and adds gradients: not under the mutex.
  for (const auto& action : after) action();
}

void Server::handle_locked(const Header& header, comm::Message&& message,
                           std::vector<std::function<void()>>& after) {
  switch (header.kind) {
    case Kind::kForwardRequest:
      serve_forward(header, message);
      break;
    case Kind::kBackwardRequest:
      serve_backward(header, message);
      break;
    case Kind::kForwardResponse:
    case Kind::kBackwardResponse: {
      const auto found = requests_.find(header.request_id);
      if (found != requests_.end()) {  // else its context was cancelled
        scheduler_.fill(*found->second, std::move(message));
      }
      break;
    }
    case Kind::kModelOutput:
    case Kind::kBackwardDone:
      scheduler_.fill(notices_[{header.kind, header.mb, header.index}],
                      std::move(message));
      break;
    case Kind::kMicrobatchEnd:
      after.push_back(
          [this, mb = static_cast<int>(header.mb)] { finish_microbatch(mb); });
      break;
    case Kind::kStepEnd:
      step_end_seen_ = true;
      changed_.notify_all();
      break;
    case Kind::kStepBegin:
      break;  // taken by on_message
  }
}

// ------------------------------------------------------------------- steps

int Server::begin_step(const std::string& name, int num_microbatches) {
  faults_->raise_if_faulted();
  std::unique_lock<std::mutex> lock(mutex_);
  SMP_ASSERT(!in_step_ && !closed_, "begin_step inside a step");
  ++step_;
  step_end_seen_ = false;
  if (is_driver()) {
    Header header;
    header.kind = Kind::kStepBegin;
    header.step = step_;
    header.index = num_microbatches;
    for (const int rank : options_.pp_ranks) {
      if (rank != options_.global_rank) post(rank, header, name, {});
    }
    return num_microbatches;
  }
  wait_until(lock, [this] { return step_begins_.count(step_) > 0; });
  const comm::Message begin = std::move(step_begins_[step_]);
  step_begins_.erase(step_);
  SMP_CHECK(begin.bytes == name, "step call ", step_, " runs '", name,
            "' here but '", begin.bytes, "' on global_rank ", driver_rank(),
            "; all ranks must call the same step functions in one order");
  return static_cast<int>(Header::read_from(begin).index);
}

void Server::run_step(int num_microbatches, uint64_t seed,
                      std::function<void(int mb)> body) {
  // Bodies go on under the caller's grad mode, autocast and inference mode.
  const auto state = std::make_shared<at::ThreadLocalState>();
  const auto shared_body =
      std::make_shared<std::function<void(int)>>(std::move(body));
  scheduler_.begin_step(step_options(num_microbatches));
  for (int mb = 0; mb < num_microbatches; ++mb) {
    scheduler_.add_body(mb, "step body, microbatch " + std::to_string(mb),
                        memory::mix_seed(seed, static_cast<uint64_t>(mb)),
                        [this, mb, state, shared_body] {
                          at::ThreadLocalStateGuard guard(*state);
                          keep_backward_on_this_thread();
                          (*shared_body)(mb);
                          finish_body(mb);
                        });
  }
  replay_early_messages();
  std::exception_ptr failure;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    try {
      wait_until(lock, [this] {
        return scheduler_.is_idle() &&
               (is_driver() || step_end_seen_ || scheduler_.cancel_reason());
      });
      failure = scheduler_.cancel_reason();
    } catch (...) {  // a fault, a time-out, Ctrl-C
      failure = std::current_exception();
    }
    if (!failure) in_step_ = false;
  }
  if (failure) abandon_step(failure);
  scheduler_.end_step();
  if (is_driver()) post_to_others(header_of(Kind::kStepEnd, 0));
}

Scheduler::StepOptions Server::step_options(int num_microbatches) const {
  Scheduler::StepOptions step;
  step.policy = policy_.get();
  step.num_microbatches = num_microbatches;
  const int active =
      options_.active_microbatches > 0
          ? options_.active_microbatches
          : policy_->default_active_microbatches(
                static_cast<int>(options_.pp_ranks.size()), num_microbatches);
  step.active_microbatches = std::min(active, num_microbatches);
  step.is_driver = is_driver();
  if (options_.deterministic && options_.order_ranks.size() > 1) {
    step.order = options_.order_ranks.front() == options_.global_rank
                     ? OrderRole::kLeader
                     : OrderRole::kFollower;
  }
  step.step = step_;
  return step;
}

// Opens the gate for messages of this step and handles those that were faster
// than this rank's script.
void Server::replay_early_messages() {
  std::vector<std::function<void()>> after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    in_step_ = true;
    std::deque<comm::Message> early;
    early.swap(early_);
    for (comm::Message& message : early) {
      const Header header = Header::read_from(message);
      if (header.step == step_) {
        handle_locked(header, std::move(message), after);
      } else if (header.step > step_) {
        early_.push_back(std::move(message));
      }
    }
  }
  for (const auto& action : after) action();
}

// Ends all contexts after a failure and raises it. The first reason counts:
// a context's own exception rather than what the others made of it.
void Server::abandon_step(std::exception_ptr failure) {
  scheduler_.cancel(failure);
  scheduler_.wait_until_idle(options_.unwind_timeout);
  failure = scheduler_.cancel_reason();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    in_step_ = false;
    notices_.clear();
    requests_.clear();
  }
  records_.clear();
  if (scheduler_.is_idle()) scheduler_.end_step();
  std::rethrow_exception(failure);
}

// Waits on `changed_` until `done`, a fault, the departure of a rank of this
// replica, Ctrl-C, or `timeout` without any progress.
void Server::wait_until(std::unique_lock<std::mutex>& lock,
                        const std::function<bool()>& done) {
  auto last_progress = Clock::now();
  int64_t progress = -1;
  std::optional<Clock::time_point> left_since;
  comm::BlockedScope blocked(faults_->waits());
  while (!done()) {
    changed_.wait_for(lock, kPoll);
    if (done()) return;
    lock.unlock();
    faults_->check_interrupt();
    // This rank's own failure arrives with its context, as the real exception.
    if (const auto fault = faults_->fault();
        fault && fault->global_rank != options_.global_rank) {
      faults_->raise_if_faulted();
    }
    const auto now = Clock::now();
    const int64_t seen = mailbox_->progress() + scheduler_.stats().num_switches;
    const bool waits = scheduler_.baton_is_free();
    if (seen != progress || !waits) last_progress = now;
    progress = seen;
    const std::string what = describe_wait();
    blocked.update(waits && now - last_progress >= kPoll, what);
    for (const int rank : ranks_needed()) {
      if (!faults_->has_left(rank)) continue;
      if (!left_since || !waits) left_since = now;
      if (now - *left_since >= comm::FaultAwareWait::kLeftGrace) {
        comm::fail_because_left(*faults_, rank, what);
      }
    }
    SMP_CHECK(
        now - last_progress < options_.timeout, "no progress for ",
        std::chrono::duration_cast<std::chrono::seconds>(now - last_progress)
            .count(),
        " s in ", what);
    lock.lock();
  }
}

// Without whom the wait cannot end. Others may have left: they are done.
std::vector<int> Server::ranks_needed() const {
  std::vector<int> ranks = scheduler_.awaited_ranks();
  if (!is_driver() && !step_end_seen_) ranks.push_back(driver_rank());
  return ranks;
}

std::string Server::describe_wait() const {
  std::string text = "step call " + std::to_string(step_) + ": ";
  if (!scheduler_.is_idle()) return text + scheduler_.describe();
  return text + "waiting for global_rank " + std::to_string(driver_rank()) +
         (in_step_ ? " to end it" : " to begin it");
}

void Server::on_fault() {
  const auto fault = faults_->fault();
  if (!fault || fault->global_rank == options_.global_rank) return;
  scheduler_.cancel(
      std::make_exception_ptr(PeerFailure(rank_prefix() + fault->describe())));
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void Server::on_context_error(const Context& context,
                              const std::exception_ptr& error) {
  if (!error_reporter_) return;
  try {
    std::rethrow_exception(error);
  } catch (const PeerFailure&) {
    // Somebody else's failure; it has been told already.
  } catch (const std::exception& e) {
    error_reporter_(context.where, e.what());
  }
}

// ------------------------------------------------- calls made by this rank

comm::Message Server::request(int owner, Header header,
                              const std::string& structure,
                              std::vector<comm::MessageTensor> tensors,
                              const char* waits_for) {
  Slot slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    header.request_id = next_request_id_++;
    requests_[header.request_id] = &slot;
  }
  struct Forget {
    Server* server;
    int64_t id;
    ~Forget() {
      std::lock_guard<std::mutex> lock(server->mutex_);
      server->requests_.erase(id);
    }
  } forget{this, header.request_id};
  post(owner, header, structure, std::move(tensors));
  comm::Message response = scheduler_.wait(slot, waits_for, owner);
  return response;
}

Header Server::header_of(Kind kind, int64_t mb) const {
  Header header;
  header.kind = kind;
  header.step = step_;
  header.mb = mb;
  return header;
}

std::pair<Call, CallId> Server::call_forward(int owner_global_rank, Call call) {
  Context* context = current_context();
  SMP_CHECK(context, "module '", module_name(call.module_id),
            "' lives on global_rank ", owner_global_rank,
            " and can be called inside a function decorated with @smp.step "
            "only");
  Header header = header_of(Kind::kForwardRequest, context->key.mb);
  header.module_id = call.module_id;
  header.flags = call.flags;
  const uint64_t call_seed = memory::mix_seed(
      context->seed, static_cast<uint64_t>(++context->num_calls));
  header.path = static_cast<int64_t>(
      memory::mix_seed(call_seed, static_cast<uint64_t>(call.module_id)));
  ++num_remote_calls_;
  comm::Message response =
      request(owner_global_rank, header, call.structure,
              std::move(call.tensors), "the result of a module");
  const Header answer = Header::read_from(response);
  Call result;
  result.module_id = call.module_id;
  result.mb = header.mb;
  result.structure = std::move(response.bytes);
  result.tensors = std::move(response.tensors);
  for (comm::MessageTensor& tensor : result.tensors) {
    tensor.data = to_device(std::move(tensor.data));
  }
  return {std::move(result), {owner_global_rank, answer.request_id}};
}

std::vector<at::Tensor> Server::call_backward(
    const CallId& id, const std::vector<at::Tensor>& grads) {
  Context* context = current_context();
  SMP_CHECK(context, "the backward of a module on global_rank ", id.owner_rank,
            " was started outside of a function decorated with @smp.step; "
            "call model.backward inside of it");
  Header header = header_of(Kind::kBackwardRequest, context->key.mb);
  header.forward_id = id.request_id;
  std::vector<comm::MessageTensor> tensors(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) tensors[i].data = grads[i];
  comm::Message response =
      request(id.owner_rank, header, {}, std::move(tensors), "gradients");
  std::vector<at::Tensor> input_grads;
  input_grads.reserve(response.tensors.size());
  for (comm::MessageTensor& tensor : response.tensors) {
    input_grads.push_back(to_device(std::move(tensor.data)));
  }
  return input_grads;
}

at::Tensor Server::to_device(at::Tensor tensor) const {
  if (!tensor.defined() || tensor.device() == options_.device) return tensor;
  return tensor.to(options_.device);
}

// ----------------------------------------------- what bodies do as a group

void Server::publish_output(const Call& output) {
  Context* context = current_context();
  SMP_ASSERT(context, "publish_output outside a context");
  Header header = header_of(Kind::kModelOutput, context->key.mb);
  header.index = context->num_model_calls++;
  header.flags = output.flags;
  for (const int rank : options_.pp_ranks) {
    if (rank == options_.global_rank) continue;
    post(rank, header, output.structure, output.tensors);
  }
}

comm::Message Server::await_notice(Kind kind, int64_t index,
                                   const char* waits_for) {
  Context* context = current_context();
  SMP_ASSERT(context, "await_notice outside a context");
  const SlotKey key{kind, context->key.mb, index};
  Slot* slot = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    slot = &notices_[key];
  }
  comm::Message message = scheduler_.wait(*slot, waits_for, driver_rank());
  std::lock_guard<std::mutex> lock(mutex_);
  notices_.erase(key);
  return message;
}

Call Server::await_output() {
  Context* context = current_context();
  SMP_ASSERT(context, "await_output outside a context");
  comm::Message message = await_notice(
      Kind::kModelOutput, context->num_model_calls++, "the model's output");
  Call output;
  output.mb = context->key.mb;
  output.flags = Header::read_from(message).flags;
  output.structure = std::move(message.bytes);
  output.tensors = std::move(message.tensors);
  for (comm::MessageTensor& tensor : output.tensors) {
    tensor.data = to_device(std::move(tensor.data));
  }
  return output;
}

void Server::begin_backward() { scheduler_.enter_phase(Phase::kBackward); }

void Server::end_backward() {
  Context* context = current_context();
  SMP_ASSERT(context, "end_backward outside a context");
  Header header = header_of(Kind::kBackwardDone, context->key.mb);
  header.index = context->num_backward_calls++;
  post_to_others(header);
}

void Server::await_backward() {
  Context* context = current_context();
  SMP_ASSERT(context, "await_backward outside a context");
  await_notice(Kind::kBackwardDone, context->num_backward_calls++,
               "the driver's backward");
}

void Server::finish_body(int mb) {
  if (!is_driver()) return;  // the driver's notice does it, see handle_locked
  post_to_others(header_of(Kind::kMicrobatchEnd, mb));
  finish_microbatch(mb);
}

void Server::finish_microbatch(int mb) {
  records_.drop_microbatch(mb);
  if (microbatch_done_) microbatch_done_(mb);
}

// ------------------------------------------------------------------- words

std::string Server::module_name(int64_t module_id) const {
  const auto i = static_cast<size_t>(module_id);
  if (i >= options_.module_names.size()) return std::to_string(module_id);
  return options_.module_names[i].empty() ? "(root)" : options_.module_names[i];
}

std::string Server::describe_task(Phase phase, int64_t mb,
                                  int64_t module_id) const {
  return "module '" + module_name(module_id) + "', microbatch " +
         std::to_string(mb) +
         (phase == Phase::kForward ? ", forward" : ", backward");
}

}  // namespace smp::pipeline
