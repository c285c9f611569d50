#include "csrc/pipeline/context_threads.h"

#include <utility>

#include "csrc/comm/thread_name.h"
#include "csrc/common/check.h"

namespace smp::pipeline {

ContextThreads::ContextThreads(Enter enter) : enter_(std::move(enter)) {}

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
  changed_.notify_one();
}

void ContextThreads::thread_main() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++num_idle_;
    changed_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
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
  }
  for (std::thread& thread : threads) thread.join();
}

int ContextThreads::num_threads() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(threads_.size());
}

}  // namespace smp::pipeline
