#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/comm/mailbox.h"

namespace smp::pipeline {

/// Threads for contexts, created on demand, kept, and joined by `join`. A
/// context needs a thread of its own because autograd and Python keep their
/// state on the stack while it waits.
class ContextThreads {
 public:
  /// Runs in each new thread around its whole life: `enter(body)` must call
  /// `body()` once. The bindings keep a Python thread state alive this way.
  using Enter = std::function<void(const std::function<void()>& body)>;

  /// @param mailbox  an idle thread receives its messages; may be null
  explicit ContextThreads(Enter enter = {}, comm::Mailbox* mailbox = nullptr);
  ~ContextThreads();  // calls join()

  /// Runs `job` on an idle thread, or on a new one when all are busy.
  void run(std::function<void()> job);

  /// Waits for running jobs and ends all threads. No `run` afterwards.
  void join();

  int num_threads() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  void thread_main();
  void wait_for_job(Lock& lock);
  bool must_wake() const { return closing_ || !jobs_.empty(); }

  const Enter enter_;
  comm::Mailbox* const mailbox_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  int num_idle_ = 0;
  std::thread::id helper_;  // an idle thread that receives messages
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace smp::pipeline
