#include "csrc/pipeline/server.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/memory/random_state.h"
#include "csrc/schedule/schedule_text.h"

namespace smp::pipeline {
namespace {

std::unique_ptr<Policy> policy_of(const Server::Options& options) {
  return options.actions ? schedule::make_listed_policy(
                               schedule::parse_actions(*options.actions))
                         : schedule::make_policy(options.policy);
}

}  // namespace

Server::Server(Options options, std::shared_ptr<mailbox::Mailbox> mailbox,
               std::shared_ptr<health::FaultBoard> faults,
               ContextThreads::Enter thread_enter)
    : options_(std::move(options)),
      mailbox_(std::move(mailbox)),
      faults_(std::move(faults)),
      policy_(policy_of(options_)),
      timeline_(options_.timeline ? options_.timeline
                                  : std::make_shared<Timeline>()),
      threads_(std::move(thread_enter), mailbox_.get()),
      scheduler_(&threads_, options_.device, timeline_.get(), mailbox_.get()),
      releases_(std::make_shared<ReleaseList>()) {
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
    scheduler_.set_order_sink(
        [this](int64_t step, const TaskKey& key) { publish_order(step, key); });
  }
  fault_subscription_ = faults_->subscribe([this] { on_fault(); });
  mailbox_->set_handler(
      mailbox::Channel::kPipeline,
      [this](mailbox::Message&& message) { on_message(std::move(message)); });
  mailbox_->set_handler(
      mailbox::Channel::kOrder, [this](mailbox::Message&& message) {
        const auto& f = message.fields;
        scheduler_.add_agreed(
            f[0], {static_cast<Phase>(f[1]), f[2], f[3], f[4], f[5]});
      });
}

Server::~Server() { close(); }

void Server::publish_order(int64_t step, const TaskKey& key) {
  for (const int peer : options_.order_ranks) {
    if (peer == options_.global_rank) continue;
    mailbox::Message message;
    message.channel = mailbox::Channel::kOrder;
    message.fields = {step,      static_cast<int64_t>(key.phase),
                      key.mb,    key.module_id,
                      key.visit, key.resume};
    mailbox_->post(peer, std::move(message));
  }
}

void Server::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  mailbox_->set_handler(mailbox::Channel::kPipeline, {});
  mailbox_->set_handler(mailbox::Channel::kOrder, {});
  faults_->unsubscribe(fault_subscription_);
  threads_.join();
  records_.clear();
  store_.clear();
  queues_.clear();
  // They refer to the model, which refers to this server.
  forward_handler_ = {};
  error_reporter_ = {};
  microbatch_done_ = {};
  handle_factory_ = {};
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

void Server::set_handle_factory(HandleFactory factory) {
  handle_factory_ = std::move(factory);
}

int64_t Server::add_modules(const std::vector<std::string>& names,
                            const std::vector<int>& chunk_idxs, int depth) {
  SMP_CHECK_VALUE(names.size() == chunk_idxs.size(), "got ", names.size(),
                  " modules and ", chunk_idxs.size(), " chunks");
  std::lock_guard<std::mutex> lock(mutex_);
  SMP_CHECK(!in_step_, "modules were added while a step runs");
  const auto first_id = static_cast<int64_t>(module_names_.size());
  module_names_.insert(module_names_.end(), names.begin(), names.end());
  chunk_idxs_.insert(chunk_idxs_.end(), chunk_idxs.begin(), chunk_idxs.end());
  depth_ = depth < 0 ? pp_rank_ : depth;
  ++num_models_;
  return first_id;
}

Server::Stats Server::stats() const {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  return stats_;
}

// ---------------------------------------------------------------- messages

Header Server::header_of(Kind kind, int64_t mb) const {
  Header header;
  header.kind = kind;
  header.step = step_;
  header.mb = mb;
  return header;
}

void Server::post(int dst, Header header, const std::string& structure,
                  std::vector<mailbox::MessageTensor> tensors) {
  mailbox::Message message;
  const auto [id, with_bytes] = structures_.on_send(dst, structure);
  header.structure_id = id;
  if (with_bytes) message.bytes = structure;
  message.tensors = std::move(tensors);
  send(dst, header, std::move(message));
}

void Server::send(int dst, const Header& header, mailbox::Message&& message) {
  header.write_to(message);
  if (dst != options_.global_rank) {
    int64_t data_bytes = 0;
    for (const mailbox::MessageTensor& tensor : message.tensors) {
      if (tensor.data.defined()) data_bytes += tensor.data.nbytes();
    }
    std::lock_guard<std::mutex> lock(stats_mutex_);
    ++stats_.headers;
    if (data_bytes > 0) stats_.data_bytes[dst] += data_bytes;
  }
  if (timeline_->is_on()) {
    timeline_->record_tensors(TimelineEvent::Kind::kSent, options_.global_rank,
                              dst, message);
  }
  mailbox_->post(dst, std::move(message));
}

void Server::post_to_others(const Header& header) {
  for (const int rank : options_.pp_ranks) {
    if (rank != options_.global_rank) post(rank, header, {}, {});
  }
}

void Server::on_message(mailbox::Message&& message) {
  try {
    take_message(std::move(message));
  } catch (...) {
    scheduler_.cancel(std::current_exception());
    throw;  // the mailbox tells the others
  }
}

void Server::take_message(mailbox::Message&& message) {
  const std::shared_lock handling(handling_);
  const Header header = Header::read_from(message);
  if (timeline_->is_on()) {
    timeline_->record_tensors(TimelineEvent::Kind::kReceived,
                              options_.global_rank, message.source_rank,
                              message);
  }
  // In the order of arrival, so that an id never precedes its bytes.
  message.bytes = structures_.on_receive(
      message.source_rank, header.structure_id, std::move(message.bytes));
  Actions after;
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
  for (auto& action : after) action();
}

void Server::handle_locked(const Header& header, mailbox::Message&& message,
                           Actions& after) {
  switch (header.kind) {
    case Kind::kForwardRequest:
    case Kind::kBackwardRequest:
    case Kind::kOperation:
      after.push_back([this, header,
                       shared = std::make_shared<mailbox::Message>(std::move(
                           message))] { serve(header, std::move(*shared)); });
      break;
    case Kind::kForwardMeta:
    case Kind::kBackwardMeta: {
      const auto found = requests_.find(header.request_id);
      if (found != requests_.end()) {  // else its context was cancelled
        scheduler_.fill(*found->second, std::move(message));
      }
      break;
    }
    case Kind::kPush:
      after.push_back([this, header, ref = message.tensors.at(0).ref] {
        push(ref, header.mb, static_cast<int>(header.index));
      });
      break;
    case Kind::kRelease:
      after.push_back([this, header, tensors = std::move(message.tensors)] {
        for (const mailbox::MessageTensor& tensor : tensors) {
          store_.release(tensor.ref, header.mb);
        }
        // Nothing orders it before the end of its microbatch.
        std::unique_lock<std::mutex> lock(mutex_);
        const bool is_late = ended_.count(header.mb) > 0;
        lock.unlock();
        if (is_late) store_.drop_microbatch(header.mb);
      });
      break;
    case Kind::kData:
      // Sent on the way that it took last time, for nobody this time.
      if (ended_.count(header.mb) > 0) break;
      after.push_back(
          [this, header, tensors = std::move(message.tensors)]() mutable {
            for (mailbox::MessageTensor& tensor : tensors) {
              store_.put(tensor.ref, header.mb, std::move(tensor.data));
            }
          });
      break;
    case Kind::kRequestsDone:
      handle_done_locked(header, message.source_rank);
      break;
    case Kind::kModelOutput:
    case Kind::kBackwardDone:
      scheduler_.fill(notices_[{header.kind, header.mb, header.index}],
                      std::move(message));
      break;
    case Kind::kBodyDone:
      end_microbatch_locked(static_cast<int>(header.mb), after);
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
      break;  // taken by take_message
  }
}

void Server::handle_done_locked(const Header& header, int owner) {
  auto& acks = acks_[header.index];
  acks[owner] = header.request_id;
  const auto waiting = ack_waits_.find(header.index);
  if (waiting == ack_waits_.end()) return;
  for (const auto& [rank, last] : waiting->second.issued) {
    if (acks[rank] < last) return;
  }
  scheduler_.fill(*waiting->second.slot, {});
}

// ------------------------------------------------------------------- steps

int Server::begin_step(const std::string& name, int num_microbatches) {
  faults_->raise_if_faulted();
  std::unique_lock<std::mutex> lock(mutex_);
  SMP_ASSERT(!in_step_ && !closed_, "begin_step inside a step");
  ++step_;
  step_end_seen_ = false;
  num_microbatches_ended_ = 0;
  bodies_done_.clear();
  ended_.clear();
  weights_.clear();
  visits_.clear();
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
  const mailbox::Message begin = std::move(step_begins_[step_]);
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
                          settle(*current_context());
                          await_requests(*current_context());
                          finish_body(mb);
                        });
  }
  std::exception_ptr failure;
  try {
    replay_early_messages();
  } catch (...) {  // a damaged message
    failure = std::current_exception();
  }
  if (!failure) {
    std::unique_lock<std::mutex> lock(mutex_);
    try {
      wait_until(lock, [this, num_microbatches] {
        if (!scheduler_.is_idle()) return false;
        if (scheduler_.cancel_reason()) return true;
        return is_driver() ? num_microbatches_ended_ == num_microbatches
                           : step_end_seen_.load();
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
  step.num_partitions = static_cast<int>(options_.pp_ranks.size());
  step.num_chunks = options_.num_chunks;
  step.depth = depth_;
  step.chunk_idxs = &chunk_idxs_;
  // Where nothing is kept there is nothing to wait for; and limits count on a
  // chain, which several models are not.
  const bool keeps =
      policy_->name() != "interleaved" || at::GradMode::is_enabled();
  step.lets_wait = policy_->name() != "simple" && keeps && num_models_ <= 1;
  return step;
}

// Handles messages that were faster than this rank's script, in their order,
// and then opens the gate: newer ones must not overtake them.
void Server::replay_early_messages() {
  std::deque<mailbox::Message> later;
  while (true) {
    Actions after;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (early_.empty()) {
        early_.swap(later);
        in_step_ = true;
        return;
      }
      mailbox::Message message = std::move(early_.front());
      early_.pop_front();
      const Header header = Header::read_from(message);
      if (header.step == step_) {
        handle_locked(header, std::move(message), after);
      } else if (header.step > step_) {
        later.push_back(std::move(message));
      }
    }
    for (auto& action : after) action();
  }
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
    acks_.clear();
    ack_waits_.clear();
    published_.clear();
  }
  // What a message of this step is just bringing would come after the clearing.
  {
    const std::unique_lock none_is_handled(handling_);
  }
  records_.clear();
  queues_.clear();
  store_.clear();
  releases_->clear();
  if (scheduler_.is_idle()) scheduler_.end_step();
  std::rethrow_exception(failure);
}

// The body of a microbatch is over here. The driver ends the microbatch when it
// is over on all ranks: until then they may ask for what was published.
void Server::finish_body(int mb) {
  Actions after;
  if (is_driver()) {
    std::lock_guard<std::mutex> lock(mutex_);
    end_microbatch_locked(mb, after);
  } else {
    post(driver_rank(), header_of(Kind::kBodyDone, mb), {}, {});
  }
  for (auto& action : after) action();
}

void Server::end_microbatch_locked(int mb, Actions& after) {
  if (++bodies_done_[mb] < static_cast<int>(options_.pp_ranks.size())) return;
  after.push_back([this, mb] {
    post_to_others(header_of(Kind::kMicrobatchEnd, mb));
    finish_microbatch(mb);
    std::lock_guard<std::mutex> lock(mutex_);
    ++num_microbatches_ended_;
    changed_.notify_all();
  });
}

void Server::finish_microbatch(int mb) {
  if (must_wait_for_weights(mb)) return;
  std::vector<RemoteRefPtr> unpublished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_.insert(mb);
    const auto found = published_.find(mb);
    if (found != published_.end()) {
      unpublished = std::move(found->second);
      published_.erase(found);
    }
  }
  unpublished.clear();
  records_.drop_microbatch(mb);
  store_.drop_microbatch(mb);
  if (microbatch_done_) microbatch_done_(mb);
  scheduler_.end_microbatch(mb);
}

}  // namespace smp::pipeline
