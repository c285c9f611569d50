#include "csrc/comm/c10d_communicator.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "csrc/comm/communicator_checks.h"
#include "csrc/comm/wait_watch.h"
#include "csrc/common/check.h"

namespace smp::comm {
namespace {

using Clock = WaitWatch::Clock;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using InnerPtr = c10::intrusive_ptr<c10d::Work>;

// Stands for "no time-out" where the library would overflow with more.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

Clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  return Clock::now() + std::min(timeout, kForever);
}

std::string reason(const std::exception_ptr& failure) {
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

// What the works of a communicator share; lives as long as any of them.
struct Shared {
  explicit Shared(BackendPtr backend) : backend(std::move(backend)) {}
  ~Shared() { end_collectives(); }

  // Ends collectives that still run in Gloo's threads, because the backend's
  // destructor waits for these. A receive that times out inside Gloo closes all
  // connections of the group, which is what we want here, and only here.
  void end_collectives() {
    const bool some_run =
        std::any_of(collectives.begin(), collectives.end(),
                    [](const InnerPtr& work) { return !work->isCompleted(); });
    if (!some_run) return;
    for (int peer = 0; peer < backend->getSize(); ++peer) {
      if (peer == backend->getRank()) continue;
      try {
        std::vector<at::Tensor> nothing{at::empty({1})};
        backend->recv(nothing, peer, kUnusedTag)
            ->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
        // Expected: timed out, or closed by the one before.
      }
    }
  }

  static constexpr int kUnusedTag = 0x7ffffffe;

  const BackendPtr backend;
  const bool is_gloo = backend->getBackendName() == "gloo";
  WaitWatch watch;
  std::mutex issue_mutex;  // c10d counts operations without a lock
  // Works that were given up while in flight: the backend still uses their
  // tensors, and a message for a buffer that is gone would break it.
  std::mutex mutex;
  std::vector<InnerPtr> messages;
  std::vector<InnerPtr> collectives;
};

using SharedPtr = std::shared_ptr<Shared>;

class C10dWork : public Work {
 public:
  C10dWork(SharedPtr shared, CallName call, InnerPtr inner)
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

  const SharedPtr shared_;
  const CallName call_;
  const InnerPtr inner_;
};

// A send or receive of Gloo. Only a blocking wait tells when it is finished;
// `abort` of the inner work makes that wait return and does nothing else.
class MessageWork final : public C10dWork {
 public:
  using C10dWork::C10dWork;

  ~MessageWork() override {
    if (poller_.joinable()) {
      abort();
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
      poller_ = std::thread([this] { run_until(Clock::now() + kForever); });
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

  int source_rank() const override { return source_; }

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
  // inside Gloo, which counts completions; the others wait for that one.
  State run_until(Clock::time_point deadline) {
    WaitWatch::Scope scope(shared_->watch, deadline, [this] { wake(); });
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
        finished = inner_->wait(kForever);
      } catch (const std::exception&) {
        error = reason(std::current_exception());
      }
      lock.lock();
      somebody_inside_ = false;
      if (finished) {
        const bool from_any = call_.peer_word == nullptr;
        source_ = from_any ? inner_->sourceRank() : call_.peer;
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
  int source_ = -1;
  std::thread poller_;  // finds out for `done`; joined by the destructor
};

// A collective of Gloo; its future tells when it is finished.
class CollectiveWork final : public C10dWork {
 public:
  /// @param finish  run by the first `wait` that succeeds; may be empty
  CollectiveWork(SharedPtr shared, CallName call, InnerPtr inner,
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
    shared_->collectives.push_back(inner_);
  }

  bool done() override {
    std::lock_guard lock(signal_->mutex);
    return signal_->done || signal_->aborted;
  }

  void wait(std::chrono::milliseconds timeout) override {
    const Clock::time_point deadline = deadline_after(timeout);
    // Only for abort: this wait keeps its deadline itself.
    WaitWatch::Scope scope(shared_->watch, Clock::time_point::max(),
                           [this] { abort(); });
    Signal& signal = *signal_;
    std::unique_lock lock(signal.mutex);
    signal.changed.wait_until(lock, deadline,
                              [&] { return signal.done || signal.aborted; });
    if (!signal.done) raise_unfinished(signal.aborted, timeout);
    if (signal.failure) raise_failed(reason(signal.failure));
    if (finish_) std::exchange(finish_, nullptr)();
  }

  void abort() override {
    std::lock_guard lock(signal_->mutex);
    signal_->aborted = true;
    signal_->changed.notify_all();
  }

 private:
  // Outlives the work, because the future may be completed after it.
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

// Any operation of a backend whose works can be polled, such as NCCL.
class PolledWork final : public C10dWork {
 public:
  using C10dWork::C10dWork;

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
      raise_failed(reason(std::current_exception()));
    }
  }

  int source_rank() const override { return call_.peer; }
  void abort() override { aborted_ = true; }

 private:
  static constexpr std::chrono::microseconds kLongestPause{100};
  std::atomic<bool> aborted_ = false;
};

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
  }
  SMP_ASSERT(false, "reduce op ", static_cast<int>(op));
}

// One-dimensional, same memory, no part of a graph.
at::Tensor flat(const at::Tensor& tensor) { return tensor.detach().view({-1}); }

class C10dCommunicator final : public Communicator {
 public:
  C10dCommunicator(BackendPtr backend, std::string name)
      : info_(std::make_shared<GroupInfo>(GroupInfo{
            std::move(name), backend->getRank(), backend->getSize()})),
        shared_(std::make_shared<Shared>(std::move(backend))) {}

  int group_rank() const override { return info_->group_rank; }
  int size() const override { return info_->size; }
  const std::string& name() const override { return info_->name; }

  WorkPtr send(const at::Tensor& tensor, int dst, int tag) override {
    CallName call{info_, "send", "dst", dst, tag};
    check_peer(call);
    check_device(tensor, call);
    return message(std::move(call), [&](c10d::Backend& backend) {
      std::vector<at::Tensor> tensors{tensor};
      return backend.send(tensors, dst, tag);
    });
  }

  WorkPtr recv(at::Tensor tensor, int src, int tag) override {
    CallName call{info_, "recv", "src", src, tag};
    check_peer(call);
    check_device(tensor, call);
    return message(std::move(call), [&](c10d::Backend& backend) {
      std::vector<at::Tensor> tensors{std::move(tensor)};
      return backend.recv(tensors, src, tag);
    });
  }

  WorkPtr recv_any(at::Tensor tensor, int tag) override {
    CallName call{info_, "recv_any", nullptr, -1, tag};
    check_tag(call);
    check_device(tensor, call);
    return message(std::move(call), [&](c10d::Backend& backend) {
      std::vector<at::Tensor> tensors{std::move(tensor)};
      return backend.recvAnysource(tensors, tag);
    });
  }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    CallName call{info_, "all_reduce"};
    check_reducible(tensor, call);
    check_device(tensor, call);
    return reduce_all(std::move(call), std::move(tensor), op);
  }

  WorkPtr broadcast(at::Tensor tensor, int root) override {
    CallName call{info_, "broadcast", "root", root};
    check_root(call);
    check_device(tensor, call);
    return collective(std::move(call), [&](c10d::Backend& backend) {
      std::vector<at::Tensor> tensors{std::move(tensor)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return backend.broadcast(tensors, options);
    });
  }

  WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override {
    CallName call{info_, "all_gather"};
    check_parts(output, input, call);
    check_device(input, call);
    at::Tensor whole = flat(output);
    at::Tensor part = flat(input);
    return collective(std::move(call), [&](c10d::Backend& backend) {
      if (!shared_->is_gloo) return backend._allgather_base(whole, part);
      std::vector<std::vector<at::Tensor>> outputs(1);
      for (int i = 0; i < size(); ++i) {
        outputs[0].push_back(whole.narrow(0, i * part.numel(), part.numel()));
      }
      std::vector<at::Tensor> inputs{part};
      return backend.allgather(outputs, inputs);
    });
  }

  WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                         ReduceOp op) override {
    CallName call{info_, "reduce_scatter"};
    check_reducible(input, call);
    check_parts(input, output, call);
    check_device(input, call);
    at::Tensor part = flat(output);
    if (shared_->is_gloo) {
      at::Tensor whole = flat(input).clone();
      auto finish = [part, whole, index = group_rank()]() mutable {
        part.copy_(whole.narrow(0, index * part.numel(), part.numel()));
      };
      return reduce_all(std::move(call), whole, op, std::move(finish));
    }
    at::Tensor whole = flat(input);
    return collective(std::move(call), [&](c10d::Backend& backend) {
      c10d::ReduceScatterOptions options;
      options.reduceOp = to_c10d(op);
      return backend._reduce_scatter_base(part, whole, options);
    });
  }

  WorkPtr barrier() override {
    return collective({info_, "barrier"},
                      [](c10d::Backend& backend) { return backend.barrier(); });
  }

  void abort() override { shared_->watch.abort(); }

 private:
  void check_device(const at::Tensor& tensor, const CallName& call) const {
    if (shared_->is_gloo) return check_cpu_tensor(tensor, call);
    check_tensor(tensor, call);
  }

  // Calls the backend; its complaints get the name of the call.
  template <typename Start>
  InnerPtr issue(const CallName& call, Start&& start) {
    SMP_CHECK(!shared_->watch.aborted(), call.text(), ": aborted");
    try {
      std::lock_guard lock(shared_->issue_mutex);
      return start(*shared_->backend);
    } catch (const std::exception&) {
      throw Error(rank_prefix() + call.text() + ": " +
                  reason(std::current_exception()));
    }
  }

  template <typename Start>
  WorkPtr message(CallName call, Start&& start) {
    InnerPtr inner = issue(call, start);
    if (shared_->is_gloo) {
      return std::make_shared<MessageWork>(shared_, std::move(call),
                                           std::move(inner));
    }
    return std::make_shared<PolledWork>(shared_, std::move(call),
                                        std::move(inner));
  }

  template <typename Start>
  WorkPtr collective(CallName call, Start&& start,
                     std::function<void()> finish = {}) {
    InnerPtr inner = issue(call, start);
    if (shared_->is_gloo) {
      return std::make_shared<CollectiveWork>(
          shared_, std::move(call), std::move(inner), std::move(finish));
    }
    return std::make_shared<PolledWork>(shared_, std::move(call),
                                        std::move(inner));
  }

  WorkPtr reduce_all(CallName call, at::Tensor tensor, ReduceOp op,
                     std::function<void()> finish = {}) {
    return collective(
        std::move(call),
        [&](c10d::Backend& backend) {
          std::vector<at::Tensor> tensors{std::move(tensor)};
          c10d::AllreduceOptions options;
          options.reduceOp = to_c10d(op);
          return backend.allreduce(tensors, options);
        },
        std::move(finish));
  }

  const std::shared_ptr<const GroupInfo> info_;
  const SharedPtr shared_;
};

}  // namespace

CommunicatorPtr make_c10d_communicator(
    c10::intrusive_ptr<c10d::Backend> backend, std::string name) {
  SMP_CHECK_VALUE(backend,
                  "make_c10d_communicator: expected a backend, got "
                  "none");
  return std::make_shared<C10dCommunicator>(std::move(backend),
                                            std::move(name));
}

}  // namespace smp::comm
