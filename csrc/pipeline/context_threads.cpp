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
  if (!idle_.empty()) {
    Worker& worker = *idle_.back();
    idle_.pop_back();
    worker.job = std::move(job);
    worker.changed.notify_one();
    return;
  }
  Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
  worker.job = std::move(job);
  worker.thread = std::thread([this, &worker] {
    comm::name_this_thread("smp-context");
    if (enter_) {
      enter_([&] { thread_main(worker); });
    } else {
      thread_main(worker);
    }
  });
}

void ContextThreads::thread_main(Worker& worker) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    worker.changed.wait(lock, [&] { return closing_ || worker.job; });
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
  }
  for (const auto& worker : workers) worker->thread.join();
  idle_.clear();
}

int ContextThreads::num_threads() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(workers_.size());
}

}  // namespace smp::pipeline
