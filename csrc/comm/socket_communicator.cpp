#include "csrc/comm/socket_communicator.h"

#include <ATen/core/grad_mode.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "csrc/comm/communicator_checks.h"
#include "csrc/comm/socket_collectives.h"
#include "csrc/comm/socket_exchange.h"
#include "csrc/comm/threaded_work.h"
#include "csrc/common/check.h"
#include "csrc/common/without_gil.h"
#include "csrc/health/thread_name.h"

namespace smp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Tags of messages are positive numbers of 31 bits.
constexpr uint64_t kCollectiveTag = uint64_t{1} << 63;
constexpr uint64_t kTagsPerCollective = 4;

Clock::time_point end_of_wait(milliseconds timeout) {
  return Clock::now() + std::min(timeout, kLongestWait);
}

uint64_t note_of(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.scalar_type()) << 56 |
         (static_cast<uint64_t>(tensor.numel()) & ((uint64_t{1} << 56) - 1));
}

at::Tensor flat_of(const at::Tensor& tensor) {
  return tensor.detach().view({-1});
}

std::string timeout_text(milliseconds timeout) {
  return detail::concat("timed out after ", timeout.count(), " ms");
}

class SocketMessageWork final : public Work {
 public:
  SocketMessageWork(std::shared_ptr<SocketExchange> exchange, CallName call,
                    at::Tensor tensor, SocketExchange::TransferPtr transfer)
      : exchange_(std::move(exchange)),
        call_(std::move(call)),
        tensor_(std::move(tensor)),
        transfer_(std::move(transfer)) {}

  bool done() override { return exchange_->is_over(*transfer_); }

  void wait(milliseconds timeout) override {
    if (!exchange_->wait_until(*transfer_, end_of_wait(timeout))) {
      fail_call(call_, timeout_text(timeout));
    }
    if (transfer_->state == SocketExchange::Transfer::State::kSucceeded) return;
    if (!transfer_->does_not_fit) fail_call(call_, transfer_->error);
    const auto dtype = static_cast<at::ScalarType>(transfer_->other_note >> 56);
    const uint64_t numel = transfer_->other_note & ((uint64_t{1} << 56) - 1);
    fail_call(call_, detail::concat("group rank ", transfer_->peer, " sent ",
                                    dtype, "[", numel, "], group rank ",
                                    exchange_->group_rank(), " receives ",
                                    describe_tensor(tensor_)));
  }

  void abort() override { exchange_->abort(transfer_); }

 private:
  const std::shared_ptr<SocketExchange> exchange_;
  const CallName call_;
  const at::Tensor tensor_;
  const SocketExchange::TransferPtr transfer_;
};

class SocketCommunicator final : public Communicator {
 public:
  SocketCommunicator(std::shared_ptr<PeerSockets> sockets, std::string name,
                     std::vector<int> global_ranks)
      : sockets_(std::move(sockets)),
        exchange_(std::make_shared<SocketExchange>(*sockets_, name,
                                                   std::move(global_ranks))),
        info_(std::make_shared<GroupInfo>(GroupInfo{
            std::move(name), exchange_->group_rank(), exchange_->size()})) {
    exchange_->start();
  }

  ~SocketCommunicator() override {
    // The thread may be dropping tensors.
    without_gil([this] {
      abort();
      if (thread_.joinable()) thread_.join();
    });
  }

  int group_rank() const override { return info_->group_rank; }
  int size() const override { return info_->size; }
  const std::string& name() const override { return info_->name; }

  WorkPtr send(const at::Tensor& tensor, int dst, int tag) override {
    CallName call{info_, "send", "dst", dst, tag};
    check_peer(call);
    check_cpu_tensor(tensor, call);
    check_not_aborted(call);
    const auto owner = std::make_shared<at::Tensor>(tensor);
    auto transfer =
        exchange_->send(dst, static_cast<uint64_t>(tag), note_of(tensor),
                        tensor.const_data_ptr(), tensor.nbytes(), owner);
    return std::make_shared<SocketMessageWork>(exchange_, std::move(call),
                                               tensor, std::move(transfer));
  }

  WorkPtr recv(at::Tensor tensor, int src, int tag) override {
    CallName call{info_, "recv", "src", src, tag};
    check_peer(call);
    check_cpu_tensor(tensor, call);
    check_not_aborted(call);
    const auto owner = std::make_shared<at::Tensor>(tensor);
    auto transfer =
        exchange_->receive(src, static_cast<uint64_t>(tag), note_of(tensor),
                           tensor.mutable_data_ptr(), tensor.nbytes(), owner);
    return std::make_shared<SocketMessageWork>(
        exchange_, std::move(call), std::move(tensor), std::move(transfer));
  }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    CallName call{info_, "all_reduce"};
    check_reducible(tensor, call);
    check_cpu_tensor(tensor, call);
    const uint64_t note = note_of(tensor) ^ static_cast<uint64_t>(op) << 48;
    return collective(
        std::move(call), 1, note,
        [tensor = flat_of(tensor), op](SocketCollective& steps) {
          steps.all_reduce(tensor, op);
        },
        tensor.numel() == 0);
  }

  WorkPtr broadcast(at::Tensor tensor, int root) override {
    CallName call{info_, "broadcast", "root", root};
    check_root(call);
    check_cpu_tensor(tensor, call);
    const uint64_t note = note_of(tensor) ^ static_cast<uint64_t>(root) << 32;
    return collective(
        std::move(call), 2, note,
        [tensor = flat_of(tensor), root](SocketCollective& steps) {
          steps.broadcast(tensor, root);
        },
        tensor.numel() == 0);
  }

  WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override {
    CallName call{info_, "all_gather"};
    check_parts(output, input, call);
    check_cpu_tensor(input, call);
    return collective(
        std::move(call), 3, note_of(input),
        [output = flat_of(output), input = flat_of(input)](
            SocketCollective& steps) { steps.all_gather(output, input); },
        input.numel() == 0,
        [output, input] { flat_of(output).copy_(flat_of(input)); });
  }

  WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                         ReduceOp op) override {
    CallName call{info_, "reduce_scatter"};
    check_reducible(input, call);
    check_parts(input, output, call);
    check_cpu_tensor(input, call);
    const uint64_t note = note_of(input) ^ static_cast<uint64_t>(op) << 48;
    return collective(
        std::move(call), 4, note,
        [output = flat_of(output), input = flat_of(input),
         op](SocketCollective& steps) {
          steps.reduce_scatter(output, input, op);
        },
        input.numel() == 0,
        [output, input] { flat_of(output).copy_(flat_of(input)); });
  }

  WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) override {
    CallName call{info_, "all_to_all"};
    check_exchange(output, input, call);
    check_cpu_tensor(input, call);
    const Counts counts(size(), input.numel() / size());
    return exchange(std::move(call), 5, note_of(input), output, input, counts,
                    counts);
  }

  WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                       const Counts& output_counts,
                       const Counts& input_counts) override {
    CallName call{info_, "all_to_all_v"};
    check_counts(output, input, output_counts, input_counts, call);
    check_cpu_tensor(input, call);
    const auto note = static_cast<uint64_t>(input.scalar_type());
    return exchange(std::move(call), 6, note, output, input, output_counts,
                    input_counts);
  }

  WorkPtr barrier() override {
    return collective(
        {info_, "barrier"}, 7, 0,
        [](SocketCollective& steps) { steps.barrier(); }, false);
  }

  void abort() override {
    {
      std::lock_guard lock(mutex_);
      is_aborted_ = true;
      for (const Job& job : jobs_) job.work->finish("aborted");
      jobs_.clear();
      if (running_) running_->finish("aborted");
      changed_.notify_all();
    }
    exchange_->abort();
  }

 private:
  using Steps = std::function<void(SocketCollective&)>;
  struct Job {
    std::shared_ptr<ThreadedWork> work;
    uint64_t tag;
    uint64_t note;
    Steps steps;
  };

  void check_not_aborted(const CallName& call) const {
    if (exchange_->is_aborted()) fail_call(call, "aborted");
  }

  WorkPtr exchange(CallName call, uint64_t kind, uint64_t note,
                   const at::Tensor& output, const at::Tensor& input,
                   Counts output_counts, Counts input_counts) {
    return collective(
        std::move(call), kind, note,
        [output = flat_of(output), input = flat_of(input),
         output_counts = std::move(output_counts),
         input_counts = std::move(input_counts)](SocketCollective& steps) {
          steps.all_to_all(output, input, output_counts, input_counts);
        },
        false, [output, input] { flat_of(output).copy_(flat_of(input)); });
  }

  /// @param is_nothing  whether there is nothing to send
  /// @param alone       work of a group of one
  WorkPtr collective(CallName call, uint64_t kind, uint64_t note, Steps steps,
                     bool is_nothing, const std::function<void()>& alone = {}) {
    check_not_aborted(call);
    auto work = std::make_shared<ThreadedWork>(std::move(call));
    if (size() == 1 || is_nothing) {
      at::NoGradGuard no_grad;
      if (alone) alone();
      work->finish("");
      return work;
    }
    std::lock_guard lock(mutex_);
    const uint64_t tag =
        kCollectiveTag | num_collectives_++ * kTagsPerCollective;
    // The note differs for different calls, even with equal sizes.
    jobs_.push_back({work, tag, note ^ kind << 40, std::move(steps)});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_all();
    return work;
  }

  void run() {
    health::name_this_thread("smp-" + info_->name);
    at::NoGradGuard no_grad;
    while (true) {
      Job job;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return is_aborted_ || !jobs_.empty(); });
        if (is_aborted_) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
        running_ = job.work;
      }
      std::string error;
      try {
        SocketCollective steps(*exchange_, job.tag, job.note);
        job.steps(steps);
      } catch (const std::exception& failure) {
        error = failure.what();
        if (error.empty()) error = "failed";
      }
      job.steps = nullptr;  // its tensors are the caller's again
      job.work->finish(std::move(error));
      std::lock_guard lock(mutex_);
      running_ = nullptr;
    }
  }

  const std::shared_ptr<PeerSockets> sockets_;
  const std::shared_ptr<SocketExchange> exchange_;
  const std::shared_ptr<const GroupInfo> info_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_aborted_ = false;
  uint64_t num_collectives_ = 0;
  std::deque<Job> jobs_;
  std::shared_ptr<ThreadedWork> running_;
  std::thread thread_;
};

}  // namespace

CommunicatorPtr make_socket_communicator(std::shared_ptr<PeerSockets> sockets,
                                         std::string name,
                                         std::vector<int> global_ranks) {
  return std::make_shared<SocketCommunicator>(
      std::move(sockets), std::move(name), std::move(global_ranks));
}

}  // namespace smp::comm
