#include "csrc/pipeline/context_threads.h"

#include <utility>

#include "csrc/common/check.h"
#include "csrc/health/thread_name.h"

namespace smp::pipeline {

ContextThreads::ContextThreads(Enter enter, mailbox::Mailbox* mailbox)
    : enter_(std::move(enter)), mailbox_(mailbox) {}

ContextThreads::~ContextThreads() { join(); }

// Prefers the helper: it may be the calling thread, and then no thread has to
// be woken.
ContextThreads::Worker* ContextThreads::take_idle() {
  if (idle_.empty()) return nullptr;
  Worker* const taken = helper_ && !helper_->job ? helper_ : idle_.back();
  std::erase(idle_, taken);
  return taken;
}

void ContextThreads::run(std::function<void()> job) {
  std::lock_guard<std::mutex> lock(mutex_);
  SMP_ASSERT(!closing_, "a context was started after join");
  if (Worker* const idle = take_idle()) {
    idle->job = std::move(job);
    if (idle != helper_) {
      idle->changed.notify_one();
    } else if (idle->thread.get_id() != std::this_thread::get_id()) {
      mailbox_->wake_helper();
    }
    return;
  }
  Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
  worker.job = std::move(job);
  worker.thread = std::thread([this, &worker] {
    health::name_this_thread("smp-context");
    if (enter_) {
      enter_([&] { thread_main(worker); });
    } else {
      thread_main(worker);
    }
  });
}

void ContextThreads::wait_for_job(Lock& lock, Worker& worker) {
  while (!must_wake(worker)) {
    if (mailbox_ != nullptr && helper_ == nullptr) {
      helper_ = &worker;
      lock.unlock();
      const bool has_helped = mailbox_->help_until(
          [&] {
            std::lock_guard<std::mutex> inner(mutex_);
            return must_wake(worker);
          },
          is_rank_idle_);
      lock.lock();
      helper_ = nullptr;
      if (has_helped) continue;
    }
    worker.changed.wait(lock, [&] { return must_wake(worker); });
  }
}

void ContextThreads::thread_main(Worker& worker) {
  Lock lock(mutex_);
  while (true) {
    wait_for_job(lock, worker);
    if (!worker.job) return;
    std::function<void()> job = std::exchange(worker.job, nullptr);
    lock.unlock();
    job();
    job = nullptr;  // release captures without the lock
    lock.lock();
    idle_.push_back(&worker);
  }
}

void ContextThreads::join() {
  std::vector<std::unique_ptr<Worker>> workers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    workers.swap(workers_);
    for (const auto& worker : workers) worker->changed.notify_all();
    if (helper_ != nullptr) mailbox_->wake_helper();
  }
  for (const auto& worker : workers) worker->thread.join();
  idle_.clear();
}

int ContextThreads::num_threads() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(workers_.size());
}

}  // namespace smp::pipeline
