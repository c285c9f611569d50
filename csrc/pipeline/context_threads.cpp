#include "csrc/pipeline/context_threads.h"

#include <utility>

#include "csrc/comm/thread_name.h"
#include "csrc/common/check.h"

namespace smp::pipeline {

ContextThreads::ContextThreads(Enter enter, comm::Mailbox* mailbox)
    : enter_(std::move(enter)), mailbox_(mailbox) {}

ContextThreads::~ContextThreads() { join(); }

void ContextThreads::run(std::function<void()> job) {
  std::lock_guard<std::mutex> lock(mutex_);
  SMP_ASSERT(!closing_, "a context was started after join");
  jobs_.push_back(std::move(job));
  // Queued jobs have claimed an idle thread each; only one beyond those
  // needs a thread of its own.
  if (static_cast<int>(jobs_.size()) > num_idle_) {
    threads_.emplace_back([this] {
      comm::name_this_thread("smp-context");
      if (enter_) {
        enter_([this] { thread_main(); });
      } else {
        thread_main();
      }
    });
  }
  // The first job is the helper's, who may be the caller.
  if (helper_ == std::thread::id() || jobs_.size() > 1) {
    changed_.notify_one();
  } else if (helper_ != std::this_thread::get_id()) {
    mailbox_->wake_helper();
  }
}

void ContextThreads::wait_for_job(Lock& lock) {
  while (!must_wake()) {
    if (mailbox_ != nullptr && helper_ == std::thread::id()) {
      helper_ = std::this_thread::get_id();
      lock.unlock();
      const bool has_helped = mailbox_->help_until([this] {
        std::lock_guard<std::mutex> inner(mutex_);
        return must_wake();
      });
      lock.lock();
      helper_ = std::thread::id();
      if (has_helped) continue;
    }
    changed_.wait(lock, [this] { return must_wake(); });
  }
}

void ContextThreads::thread_main() {
  Lock lock(mutex_);
  while (true) {
    ++num_idle_;
    wait_for_job(lock);
    --num_idle_;
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // release captures without the lock
    lock.lock();
  }
}

void ContextThreads::join() {
  std::vector<std::thread> threads;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    threads.swap(threads_);
    changed_.notify_all();
    if (helper_ != std::thread::id()) mailbox_->wake_helper();
  }
  for (std::thread& thread : threads) thread.join();
}

int ContextThreads::num_threads() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(threads_.size());
}

}  // namespace smp::pipeline
