#pragma once

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/mailbox/mailbox.h"
#include "tests/cpp/lanes/fake_source.h"

namespace smp::mailbox {

inline at::Tensor filled(double value, int64_t size = 40) {
  return at::full({size}, value, at::kDouble);
}

/// A rank with lanes, which keeps what comes.
class LaneRank {
 public:
  LaneRank(int self, const comm::CommunicatorPtr& world,
           std::optional<lanes::FakeOptions> fake,
           const shm::SharedMemoryPtr& memory = nullptr)
      : board(std::make_shared<health::FaultBoard>(self)),
        mailbox(world, board, memory, options_of(fake)) {
    mailbox.set_handler(Channel::kPipeline, [this](Message&& message) {
      std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
      changed_.notify_all();
    });
  }
  ~LaneRank() { mailbox.set_handler(Channel::kPipeline, {}); }

  std::vector<Message> wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20),
                                  [&] { return messages_.size() >= count; }))
        << messages_.size() << " of " << count;
    return messages_;
  }
  size_t num_messages() {
    std::lock_guard lock(mutex_);
    return messages_.size();
  }

  const std::shared_ptr<health::FaultBoard> board;
  Mailbox mailbox;

 private:
  static lanes::LaneOptions options_of(
      const std::optional<lanes::FakeOptions>& fake) {
    lanes::LaneOptions options;
    if (fake) options.source = lanes::fake_source(*fake);
    return options;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Message> messages_;
};

inline Message with_tensors(int64_t number,
                            std::vector<MessageTensor> tensors = {}) {
  Message message;
  message.channel = Channel::kPipeline;
  message.fields[0] = number;
  message.tensors = std::move(tensors);
  return message;
}

}  // namespace smp::mailbox
