#include "csrc/comm/c10d_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/common/log.h"
#include "csrc/common/torch_releases.h"
#include "csrc/common/without_gil.h"
#include "csrc/common/without_throwing.h"
#include "csrc/health/thread_name.h"

namespace smp::comm {
namespace {

using Clock = health::WaitWatch::Clock;

// Replaces longer time-outs, with which the library would overflow.
constexpr std::chrono::milliseconds kLongestTimeout =
    std::chrono::hours(24 * 365);

// Time a collective may take to notice that its connections are closed.
constexpr std::chrono::milliseconds kEndTimeout{2000};

// Time a group waits for the end of its backend.
constexpr std::chrono::milliseconds kLongestEnd{30000};

Clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  return Clock::now() + std::min(timeout, kLongestTimeout);
}

}  // namespace

std::string reason_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "exception of unknown type";
  }
}

namespace {

void abort_connections(c10d::Backend& backend, const C10dOptions& options) {
  if (abort_if_offered(backend)) return;
  if (options.end) {
    options.end();
  } else {
    SMP_LOG(kWarning, "torch offers no abort for backend ",
            backend.getBackendName(),
            "; what it has on its way ends at its own time-out");
  }
}

void finish_operations(c10d::Backend& backend, const C10dOptions& options) {
  const c10::Device device = options.device;
  if (!device.is_cpu()) {
    c10::impl::VirtualGuardImpl(device.type())
        .synchronizeDevice(device.index());
  }
  shut_down_if_offered(backend);
}

}  // namespace

C10dShared::C10dShared(C10dBackendPtr backend, C10dOptions options)
    : backend(std::move(backend)),
      is_gloo(this->backend->getBackendName() == "gloo"),
      options_(std::move(options)) {}

void C10dShared::abort_backend() { begin_end(&abort_connections); }

void C10dShared::shut_down_backend() noexcept {
  without_throwing("the end of a group", [this] {
    begin_end(&finish_operations);
    await_end();
    watch.abort();
  });
}

void C10dShared::begin_end(End end) {
  const std::lock_guard lock(mutex);
  if (ended_.valid()) return;
  std::promise<void> promise;
  ended_ = promise.get_future().share();
  ender_ = std::thread([end, backend = backend, options = options_,
                        promise = std::move(promise)]() mutable {
    health::name_this_thread("smp-group-end");
    without_throwing("the end of a group", [&] {
      const c10::Device device = options.device;
      c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
      end(*backend, options);
    });
    backend.reset();
    promise.set_value();
  });
}

void C10dShared::await_end() {
  std::unique_lock lock(mutex);
  std::thread ender = std::move(ender_);
  const std::shared_future<void> ended = ended_;
  lock.unlock();
  if (!ender.joinable()) return;
  if (ended.wait_for(kLongestEnd) == std::future_status::ready) {
    return ender.join();
  }
  // A library that hangs in its end must not hang us.
  SMP_LOG(kWarning, "a group of ranks has not ended after ",
          kLongestEnd.count(), " ms");
  ender.detach();
}

C10dShared::~C10dShared() {
  // Gloo's destructor joins threads that may be dropping tensors.
  without_gil(
      [this] { without_throwing("the end of a group", [this] { end(); }); });
}

void C10dShared::end() {
  await_end();
  if (!end_collectives()) {
    // The destructor of the backend would wait for ever. This happens after a
    // failure only, so the works are leaked until the process ends.
    SMP_LOG(kWarning,
            "a collective that was cut off in the middle of its transfer "
            "keeps its connections until this process ends");
    new std::vector<C10dWorkPtr>(std::move(collectives));
    new std::vector<C10dWorkPtr>(std::move(messages));
    (void)backend.release();
    return;
  }
  messages.clear();
  collectives.clear();
  backend.reset();
}

bool C10dShared::some_collective_runs() const {
  return std::any_of(
      collectives.begin(), collectives.end(),
      [](const C10dWorkPtr& work) { return !work->isCompleted(); });
}

bool C10dShared::end_collectives() {
  if (!some_collective_runs()) return true;
  constexpr int kUnusedTag = 0x7ffffffe;
  for (int peer = 0; peer < backend->getSize(); ++peer) {
    if (peer == backend->getRank()) continue;
    try {
      std::vector<at::Tensor> nothing{at::empty({1})};
      backend->recv(nothing, peer, kUnusedTag)
          ->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
      // Expected: the receive timed out, or an earlier one closed its
      // connection.
    }
  }
  const Clock::time_point deadline = Clock::now() + kEndTimeout;
  while (some_collective_runs()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

namespace {

class C10dWork : public Work {
 public:
  C10dWork(C10dSharedPtr shared, CallName call, C10dWorkPtr inner)
      : shared_(std::move(shared)),
        call_(std::move(call)),
        inner_(std::move(inner)) {}

 protected:
  [[noreturn]] void raise_failed(const std::string& why) const {
    throw Error(rank_prefix() + call_.text() + ": " + why);
  }

  [[noreturn]] void raise_unfinished(bool aborted,
                                     std::chrono::milliseconds timeout) const {
    if (aborted || shared_->watch.aborted()) raise_failed("aborted");
    raise_failed(detail::concat("timed out after ", timeout.count(), " ms"));
  }

  const C10dSharedPtr shared_;
  const CallName call_;
  const C10dWorkPtr inner_;
};

// A send or receive of Gloo. Only a blocking wait shows that it is finished;
// `abort` of the inner work makes that wait return and does nothing else.
class MessageWork final : public C10dWork {
 public:
  using C10dWork::C10dWork;

  ~MessageWork() override {
    if (poller_.joinable()) {
      without_throwing("the end of a message", [this] { abort(); });
      poller_.join();
    }
    if (state_ != State::kRunning) return;
    std::lock_guard lock(shared_->mutex);
    shared_->messages.push_back(inner_);
  }

  bool done() override {
    std::lock_guard lock(mutex_);
    if (state_ != State::kRunning || aborted_ || shared_->watch.aborted()) {
      return true;
    }
    if (!poller_.joinable()) {
      poller_ =
          std::thread([this] { run_until(Clock::now() + kLongestTimeout); });
    }
    return false;
  }

  void wait(std::chrono::milliseconds timeout) override {
    switch (run_until(deadline_after(timeout))) {
      case State::kSucceeded:
        return;
      case State::kFailed:
        raise_failed(error_);
      case State::kRunning:
        raise_unfinished(aborted_, timeout);
    }
  }

  void abort() override {
    aborted_ = true;
    wake();
  }

 private:
  enum class State { kRunning, kSucceeded, kFailed };

  void wake() {
    std::lock_guard lock(mutex_);
    if (somebody_inside_) inner_->abort();
    changed_.notify_all();
  }

  bool go_on(Clock::time_point deadline) const {
    return state_ == State::kRunning && !aborted_ &&
           !shared_->watch.aborted() && Clock::now() < deadline;
  }

  // Waits until finished, aborted or `deadline`. One thread at a time waits
  // inside Gloo, which counts completions; the others wait for that thread.
  State run_until(Clock::time_point deadline) {
    health::WaitWatch::Scope scope(shared_->watch, deadline,
                                   [this] { wake(); });
    std::unique_lock lock(mutex_);
    while (go_on(deadline)) {
      if (somebody_inside_) {
        changed_.wait_until(lock, deadline);
        continue;
      }
      somebody_inside_ = true;
      lock.unlock();
      bool finished = false;
      std::string error;
      try {
        finished = inner_->wait(kLongestTimeout);
      } catch (const std::exception&) {
        error = reason_of(std::current_exception());
      }
      lock.lock();
      somebody_inside_ = false;
      if (finished) {
        state_ = State::kSucceeded;
      } else if (!error.empty()) {
        error_ = std::move(error);
        state_ = State::kFailed;
      }
      changed_.notify_all();
    }
    return state_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> aborted_ = false;
  State state_ = State::kRunning;
  bool somebody_inside_ = false;
  std::string error_;
  std::thread poller_;  // finds out for `done`; joined by the destructor
};

// A collective of Gloo; its future is completed when it is finished.
class CollectiveWork final : public C10dWork {
 public:
  /// @param finish  run by the first `wait` that succeeds; may be empty
  CollectiveWork(C10dSharedPtr shared, CallName call, C10dWorkPtr inner,
                 std::function<void()> finish)
      : C10dWork(std::move(shared), std::move(call), std::move(inner)),
        finish_(std::move(finish)) {
    inner_->getFuture()->addCallback([signal = signal_](auto& future) {
      std::lock_guard lock(signal->mutex);
      signal->done = true;
      if (future.hasError()) signal->failure = future.exception_ptr();
      signal->changed.notify_all();
    });
  }

  ~CollectiveWork() override {
    if (signal_->done) return;
    std::lock_guard lock(shared_->mutex);
    std::erase_if(shared_->collectives,
                  [](const C10dWorkPtr& work) { return work->isCompleted(); });
    shared_->collectives.push_back(inner_);
  }

  bool done() override {
    std::lock_guard lock(signal_->mutex);
    return signal_->done || signal_->aborted;
  }

  void wait(std::chrono::milliseconds timeout) override {
    const Clock::time_point deadline = deadline_after(timeout);
    // The scope is for abort only: this wait keeps its deadline itself.
    health::WaitWatch::Scope scope(shared_->watch, Clock::time_point::max(),
                                   [this] { abort(); });
    Signal& signal = *signal_;
    std::unique_lock lock(signal.mutex);
    signal.changed.wait_until(lock, deadline,
                              [&] { return signal.done || signal.aborted; });
    if (!signal.done) raise_unfinished(signal.aborted, timeout);
    if (signal.failure) raise_failed(reason_of(signal.failure));
    if (finish_) std::exchange(finish_, nullptr)();
  }

  void abort() override {
    std::lock_guard lock(signal_->mutex);
    signal_->aborted = true;
    signal_->changed.notify_all();
  }

 private:
  // Outlives the work, because the future may be completed later.
  struct Signal {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> done = false;
    bool aborted = false;
    std::exception_ptr failure;
  };

  const std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  std::function<void()> finish_;
};

// An operation of a backend whose works can be polled, such as NCCL.
class PolledWork final : public C10dWork {
 public:
  PolledWork(C10dSharedPtr shared, CallName call, C10dWorkPtr inner,
             std::vector<at::Tensor> tensors)
      : C10dWork(std::move(shared), std::move(call), std::move(inner)),
        tensors_(std::move(tensors)) {}

  bool done() override { return aborted_ || inner_->isCompleted(); }

  void wait(std::chrono::milliseconds timeout) override {
    const Clock::time_point deadline = deadline_after(timeout);
    auto pause = std::chrono::microseconds(1);
    while (!inner_->isCompleted()) {
      if (aborted_ || shared_->watch.aborted() || Clock::now() >= deadline) {
        raise_unfinished(aborted_, timeout);
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
    try {
      inner_->wait();  // finished: only orders the current stream
    } catch (const std::exception&) {
      raise_failed(reason_of(std::current_exception()));
    }
  }

  bool order_stream() override {
    if (aborted_ || shared_->watch.aborted()) raise_failed("aborted");
    try {
      inner_->wait();  // of the stream
    } catch (const std::exception&) {
      raise_failed(reason_of(std::current_exception()));
    }
    return true;
  }

  void abort() override { aborted_ = true; }

 private:
  static constexpr std::chrono::microseconds kLongestPause{100};
  // c10d forgets them as soon as some stream comes after the operation. Memory
  // of another stream may be taken again before the device has read it.
  const std::vector<at::Tensor> tensors_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

WorkPtr make_message_work(C10dSharedPtr shared, CallName call,
                          C10dWorkPtr inner) {
  return std::make_shared<MessageWork>(std::move(shared), std::move(call),
                                       std::move(inner));
}

WorkPtr make_collective_work(C10dSharedPtr shared, CallName call,
                             C10dWorkPtr inner, std::function<void()> finish) {
  return std::make_shared<CollectiveWork>(std::move(shared), std::move(call),
                                          std::move(inner), std::move(finish));
}

WorkPtr make_polled_work(C10dSharedPtr shared, CallName call, C10dWorkPtr inner,
                         std::vector<at::Tensor> tensors) {
  return std::make_shared<PolledWork>(std::move(shared), std::move(call),
                                      std::move(inner), std::move(tensors));
}

}  // namespace smp::comm
