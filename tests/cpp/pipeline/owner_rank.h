#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/health/fault_board.h"
#include "csrc/mailbox/mailbox.h"
#include "csrc/pipeline/messenger.h"
#include "csrc/pipeline/module_table.h"
#include "csrc/pipeline/scheduler.h"
#include "tests/cpp/comm/run_ranks.h"

namespace smp::pipeline {

/// One of two ranks in a test of a single owner: what all owners need, and the
/// messages that arrive, which a peer reads one by one.
class OwnerRank {
 public:
  /// Takes the messages of this rank; without it they wait for `receive`.
  using Take = std::function<void(const Header&, mailbox::Message&&)>;

  OwnerRank(int rank, const comm::CommunicatorPtr& world);
  ~OwnerRank();

  /// Gets those first that wait.
  void set_take(Take take);
  /// The next message. Fails the test after ten seconds.
  std::pair<Header, mailbox::Message> receive();
  /// The same, which must be of this kind.
  std::pair<Header, mailbox::Message> receive(Kind kind);
  /// Runs `body` as the step body of microbatch 0, and what is served
  /// meanwhile. Raises what a context raised.
  void run(const std::function<void()>& body);
  /// A step of one microbatch in which services may run.
  void begin_step();
  /// Waits until all contexts have ended. Raises what one of them raised.
  void end_step();

  const int rank;
  const std::unique_ptr<Policy> policy;
  const std::shared_ptr<mailbox::Mailbox> mailbox;
  ModuleTable modules;
  Messenger messenger;
  ContextThreads threads;
  Scheduler scheduler;

 private:
  std::mutex taking_;  // before the other one
  std::mutex mutex_;
  std::condition_variable arrived_;
  Take take_;
  std::deque<std::pair<Header, mailbox::Message>> messages_;
};

/// Runs one function per rank, as threads: the owner under test and its peer.
void run_pair(const std::function<void(OwnerRank&)>& subject,
              const std::function<void(OwnerRank&)>& peer);

}  // namespace smp::pipeline
