#include "csrc/pipeline/server.h"

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"

namespace smp::pipeline {

Server::Server(Options options, std::shared_ptr<mailbox::Mailbox> mailbox,
               std::shared_ptr<health::FaultBoard> faults,
               ContextThreads::Enter thread_enter)
    : options_(std::move(options)),
      mailbox_(std::move(mailbox)),
      faults_(std::move(faults)),
      policy_(schedule::make_policy(options_.policy)),
      timeline_(options_.timeline
                    ? options_.timeline
                    : std::make_shared<Timeline>(options_.device)),
      messenger_(options_.global_rank, options_.pp_ranks, mailbox_, timeline_),
      threads_(std::move(thread_enter), mailbox_.get()),
      scheduler_(&threads_, options_.device, timeline_.get(), mailbox_.get(),
                 options_.device_meter),
      tensors_(options_.device, options_.num_chunks > 1, messenger_,
               scheduler_),
      caller_(!options_.has_order(), modules_, messenger_, scheduler_,
              tensors_),
      weights_(modules_, *policy_, scheduler_,
               [this](int mb) { steps_.finish_microbatch(mb); }),
      callee_(modules_, messenger_, scheduler_, tensors_, caller_, weights_),
      announcements_(messenger_, scheduler_, tensors_),
      steps_(options_,
             {modules_, *policy_, messenger_, scheduler_, tensors_, caller_,
              callee_, weights_, announcements_},
             mailbox_, faults_) {
  timeline_->set_copies(mailbox_->lane_copies());
  const auto& ranks = options_.pp_ranks;
  SMP_ASSERT(std::count(ranks.begin(), ranks.end(), options_.global_rank) == 1,
             "rank outside of its pipeline group");
  scheduler_.set_error_sink(
      [this](const Context& context, const std::exception_ptr& error) {
        on_context_error(context, error);
      });
  scheduler_.set_idle_sink([this] { steps_.wake(); });
  if (options_.leads_order()) {
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
  if (closed_.exchange(true)) return;
  mailbox_->set_handler(mailbox::Channel::kPipeline, {});
  mailbox_->set_handler(mailbox::Channel::kOrder, {});
  faults_->unsubscribe(fault_subscription_);
  threads_.join();
  callee_.close();
  tensors_.close();
  steps_.close();
  error_reporter_ = {};
}

void Server::set_error_reporter(ErrorReporter reporter) {
  error_reporter_ = std::move(reporter);
}

int64_t Server::add_modules(const std::vector<std::string>& names,
                            const std::vector<int>& chunk_idxs, int depth) {
  SMP_CHECK(!steps_.is_open(), "modules were added while a step runs");
  if (depth < 0) {
    const auto& ranks = options_.pp_ranks;
    depth = static_cast<int>(
        std::find(ranks.begin(), ranks.end(), options_.global_rank) -
        ranks.begin());
  }
  return modules_.add(names, chunk_idxs, depth);
}

Server::Stats Server::stats() const {
  const Messenger::Stats sent = messenger_.stats();
  const TensorDirectory::Stats moved = tensors_.stats();
  return {.headers = sent.headers,
          .requests = caller_.num_requests(),
          .pushes = moved.pushes,
          .fetches = moved.fetches,
          .data_bytes = sent.data_bytes};
}

void Server::on_message(mailbox::Message&& message) {
  try {
    steps_.receive(std::move(message));
  } catch (...) {
    scheduler_.cancel(std::current_exception());
    throw;  // the mailbox informs the other ranks
  }
}

void Server::on_fault() {
  const auto fault = faults_->fault();
  if (!fault || fault->is_raised_by(options_.global_rank)) return;
  scheduler_.cancel(
      std::make_exception_ptr(PeerFailure(rank_prefix() + fault->describe())));
  steps_.wake();
}

void Server::on_context_error(const Context& context,
                              const std::exception_ptr& error) {
  if (!error_reporter_) return;
  try {
    std::rethrow_exception(error);
  } catch (const PeerFailure&) {
    // The failure came from another rank, which has reported it already.
  } catch (const std::exception& e) {
    error_reporter_(context.where, e.what());
  }
}

}  // namespace smp::pipeline
