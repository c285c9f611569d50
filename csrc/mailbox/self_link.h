#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "csrc/mailbox/link.h"

namespace smp::mailbox {

/// Delivers a rank's messages to itself, by a thread that starts with the first
/// of them.
class SelfLink final : public Link {
 public:
  using Link::Link;

  void post(int dst, Message message) override;
  void stop() override;

 private:
  void deliver_all();

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<Message> messages_;
  std::thread thread_;
};

}  // namespace smp::mailbox
