#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/mailbox/mailbox.h"

namespace smp::pipeline {

/// Threads for contexts, created on demand, kept, and joined by `join`. A
/// context needs a thread of its own because autograd and Python keep their
/// state on the stack while it waits.
///
/// The thread that was used last is used first: libraries for matrix products
/// keep some MB of working memory in each thread that has ever called them.
class ContextThreads {
 public:
  /// Runs in each new thread around its whole life: `enter(body)` must call
  /// `body()` once. The bindings keep a Python thread state alive this way.
  using Enter = std::function<void(const std::function<void()>& body)>;

  /// @param mailbox  mailbox whose messages an idle thread receives; may be
  ///     null
  explicit ContextThreads(Enter enter = {},
                          mailbox::Mailbox* mailbox = nullptr);
  ~ContextThreads();  // calls join()

  /// Sets a probe that returns whether nothing of this rank computes. Call it
  /// before the first `run`.
  void set_idle_probe(std::function<bool()> is_idle) {
    is_rank_idle_ = std::move(is_idle);
  }

  /// Runs `job` on an idle thread, or on a new one when all are busy.
  void run(std::function<void()> job);

  /// Waits for running jobs and ends all threads. No `run` afterwards.
  void join();

  int num_threads() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Worker {
    std::condition_variable changed;
    std::function<void()> job;
    std::thread thread;
  };

  Worker* take_idle();
  void thread_main(Worker& worker);
  void wait_for_job(Lock& lock, Worker& worker);
  bool must_wake(const Worker& worker) const { return closing_ || worker.job; }

  const Enter enter_;
  mailbox::Mailbox* const mailbox_;
  std::function<bool()> is_rank_idle_ = [] { return false; };
  mutable std::mutex mutex_;
  bool closing_ = false;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Worker*> idle_;  // the one that was used last at the end
  Worker* helper_ = nullptr;   // receives messages while it is idle
};

}  // namespace smp::pipeline
