#include "tests/cpp/pipeline/owner_rank.h"

#include <chrono>
#include <stdexcept>

namespace smp::pipeline {

OwnerRank::OwnerRank(int the_rank, const comm::CommunicatorPtr& world)
    : rank(the_rank),
      policy(schedule::make_policy("interleaved")),
      mailbox(std::make_shared<mailbox::Mailbox>(
          world, std::make_shared<health::FaultBoard>(the_rank))),
      messenger(the_rank, {0, 1}, mailbox, std::make_shared<Timeline>()),
      threads({}, mailbox.get()),
      scheduler(&threads, at::kCPU, nullptr, mailbox.get()) {
  messenger.set_step(0);
  modules.add({"", "first", "second"}, {0, 0, 0}, rank);
  mailbox->set_handler(mailbox::Channel::kPipeline,
                       [this](mailbox::Message&& message) {
                         const Header header = messenger.open(message);
                         std::lock_guard<std::mutex> taking(taking_);
                         if (take_) return take_(header, std::move(message));
                         std::lock_guard<std::mutex> lock(mutex_);
                         messages_.emplace_back(header, std::move(message));
                         arrived_.notify_all();
                       });
}

OwnerRank::~OwnerRank() {
  mailbox->set_handler(mailbox::Channel::kPipeline, {});
  threads.join();
  mailbox->close();
}

void OwnerRank::set_take(Take take) {
  std::lock_guard<std::mutex> taking(taking_);
  take_ = std::move(take);
  if (!take_) return;
  std::deque<std::pair<Header, mailbox::Message>> early;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    early.swap(messages_);
  }
  for (auto& [header, message] : early) take_(header, std::move(message));
}

std::pair<Header, mailbox::Message> OwnerRank::receive() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!arrived_.wait_for(lock, std::chrono::seconds(120),
                         [this] { return !messages_.empty(); })) {
    throw std::runtime_error("no message came");
  }
  auto message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

std::pair<Header, mailbox::Message> OwnerRank::receive(Kind kind) {
  auto received = receive();
  EXPECT_EQ(to_string(received.first.kind), std::string(to_string(kind)));
  return received;
}

void OwnerRank::begin_step() {
  StepOptions options;
  options.policy = policy.get();
  scheduler.begin_step(options);
}

void OwnerRank::end_step() {
  if (!scheduler.wait_until_idle(std::chrono::seconds(120))) {
    throw std::runtime_error("still at work: " + scheduler.describe());
  }
  const std::exception_ptr failure = scheduler.cancel_reason();
  scheduler.end_step();
  if (failure) std::rethrow_exception(failure);
}

void OwnerRank::run(const std::function<void()>& body) {
  begin_step();
  scheduler.add_body(0, "body", 1, body);
  end_step();
}

void run_pair(const std::function<void(OwnerRank&)>& subject,
              const std::function<void(OwnerRank&)>& peer) {
  comm::run_ranks(2, [&](int rank, const comm::CommunicatorPtr& world) {
    OwnerRank self(rank, world);
    (rank == 0 ? subject : peer)(self);
  });
}

}  // namespace smp::pipeline
