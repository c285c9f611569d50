#include "csrc/comm/hierarchical_communicator.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/comm/communicator_checks.h"
#include "csrc/comm/forwarding_communicator.h"
#include "csrc/comm/host_hops.h"
#include "csrc/comm/next_stamps.h"
#include "csrc/comm/sum_pieces.h"
#include "csrc/comm/threaded_work.h"
#include "csrc/common/check.h"
#include "csrc/common/without_gil.h"
#include "csrc/common/without_throwing.h"
#include "csrc/health/thread_name.h"

namespace smp::comm {
namespace {

// Most pieces between the hosts, whose shares use memory. There are enough to
// keep the network busy while hosts sum.
constexpr int kMostCrossing = 4;

// A piece of a tensor on its way through the hosts. A collective is over when
// its last piece has arrived.
struct HoppingPiece {
  std::shared_ptr<ThreadedWork> work;
  HostHopsPtr hops;
  bool is_last = true;
};

// Carries out the pieces of all collectives, one after the other, in two
// threads.
class PiecePipeline {
 public:
  explicit PiecePipeline(HostGroups groups) : groups_(std::move(groups)) {}

  ~PiecePipeline() {
    // The threads may be dropping tensors.
    without_gil([this] {
      without_throwing("the abort of a group by hosts", [this] {
        if (end("aborted")) abort_hops();
      });
      if (leaver_.joinable()) leaver_.join();
      if (arriver_.joinable()) arriver_.join();
    });
  }

  const HostGroups& groups() const { return groups_; }

  /// @throws Error where an earlier collective has failed, or after `abort`
  WorkPtr begin(CallName call, std::vector<HostHopsPtr> all_hops) {
    auto work = std::make_shared<ThreadedWork>(call);
    const std::lock_guard lock(mutex_);
    if (!error_.empty()) fail_call(call, error_);
    for (HostHopsPtr& hops : all_hops) {
      const bool is_last = &hops == &all_hops.back();
      leaving_.push_back({work, std::move(hops), is_last});
    }
    if (all_hops.empty()) {
      work->finish("");
      return work;
    }
    if (!leaver_.joinable()) {
      leaver_ =
          std::thread([this] { run(&PiecePipeline::leave_next, "smp-out-"); });
      arriver_ =
          std::thread([this] { run(&PiecePipeline::arrive_next, "smp-in-"); });
    }
    changed_.notify_all();
    return work;
  }

  void abort() {
    end("aborted");
    abort_hops();
  }

 private:
  /// @return whether a thread works on a piece
  bool end(const std::string& error) {
    const std::lock_guard lock(mutex_);
    if (error_.empty()) error_ = error;
    for (const std::deque<HoppingPiece>* pieces : {&leaving_, &crossing_}) {
      for (const HoppingPiece& piece : *pieces) piece.work->finish(error_);
    }
    for (const auto& work : on_the_way_) work->finish(error_);
    changed_.notify_all();
    return !on_the_way_.empty();
  }

  void abort_hops() {
    groups_.scatter->abort();
    groups_.across->abort();
    groups_.gather->abort();
  }

  void run(bool (PiecePipeline::*go)(), const std::string& which) {
    health::name_this_thread(which + groups_.flat->name());
    const at::NoGradGuard no_grad;
    try {
      while ((this->*go)()) {
      }
    } catch (const std::exception& error) {
      end(plain_text(error));
    }
  }

  bool leave_next() {
    HoppingPiece piece;
    if (!take(piece, leaving_,
              [this] { return num_crossing_ < kMostCrossing; }))
      return false;
    piece.hops->leave(groups_);
    const std::lock_guard lock(mutex_);
    remove_from_threads(piece);
    ++num_crossing_;
    crossing_.push_back(std::move(piece));
    changed_.notify_all();
    return true;
  }

  bool arrive_next() {
    HoppingPiece piece;
    if (!take(piece, crossing_, [] { return true; })) return false;
    piece.hops->arrive(groups_);
    piece.hops.reset();  // its tensors are the caller's again
    const std::lock_guard lock(mutex_);
    remove_from_threads(piece);
    --num_crossing_;
    if (piece.is_last) piece.work->finish("");
    changed_.notify_all();
    return true;
  }

  // Takes the next piece, once it may go; returns false at the end.
  template <typename May>
  bool take(HoppingPiece& piece, std::deque<HoppingPiece>& pieces, May&& may) {
    std::unique_lock lock(mutex_);
    changed_.wait(
        lock, [&] { return !error_.empty() || (!pieces.empty() && may()); });
    if (!error_.empty()) return false;
    piece = std::move(pieces.front());
    pieces.pop_front();
    on_the_way_.push_back(piece.work);
    return true;
  }

  void remove_from_threads(const HoppingPiece& piece) {
    on_the_way_.erase(
        std::find(on_the_way_.begin(), on_the_way_.end(), piece.work));
  }

  const HostGroups groups_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string error_;  // why nothing goes on; empty: it does
  std::deque<HoppingPiece> leaving_;
  std::deque<HoppingPiece> crossing_;
  std::vector<std::shared_ptr<ThreadedWork>> on_the_way_;  // in the threads
  int num_crossing_ = 0;  // pieces that have left and have not arrived
  std::thread leaver_;
  std::thread arriver_;
};

at::Tensor line_of(const at::Tensor& tensor) {
  return tensor.detach().view({-1});
}

class HierarchicalCommunicator final : public ForwardingCommunicator {
 public:
  explicit HierarchicalCommunicator(HostGroups groups)
      : ForwardingCommunicator(groups.flat),
        info_(std::make_shared<GroupInfo>(
            GroupInfo{inner_->name(), inner_->group_rank(), inner_->size()})),
        is_host_by_host_(groups.is_host_by_host),
        pipeline_(std::move(groups)) {}

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    CallName call{info_, "all_reduce"};
    check_reducible(tensor, call);
    check_cpu_tensor(tensor, call);
    const at::Tensor line = line_of(tensor);
    const int64_t per_host = pipeline_.groups().scatter->size();
    const int64_t longest =
        kShareBytes / static_cast<int64_t>(line.element_size()) * per_host;
    const uint64_t stamp = stamps_.take();
    std::vector<HostHopsPtr> hops;
    int64_t begin = 0;
    for (const int64_t numel : sum_pieces(line.numel(), longest)) {
      hops.push_back(make_sum_hops(line.narrow(0, begin, numel), op, stamp));
      begin += numel;
    }
    return pipeline_.begin(std::move(call), std::move(hops));
  }

  WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                         ReduceOp op) override {
    if (!is_host_by_host_) {
      return flat().reduce_scatter(std::move(output), input, op);
    }
    CallName call{info_, "reduce_scatter"};
    check_reducible(input, call);
    check_parts(input, output, call);
    check_cpu_tensor(input, call);
    std::vector<HostHopsPtr> hops;
    const uint64_t stamp = stamps_.take();
    if (input.numel() > 0) {
      hops.push_back(
          make_scatter_hops(line_of(output), line_of(input), op, stamp));
    }
    return pipeline_.begin(std::move(call), std::move(hops));
  }

  WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override {
    if (!is_host_by_host_) return flat().all_gather(std::move(output), input);
    CallName call{info_, "all_gather"};
    check_parts(output, input, call);
    check_cpu_tensor(input, call);
    std::vector<HostHopsPtr> hops;
    const uint64_t stamp = stamps_.take();
    if (input.numel() > 0) {
      hops.push_back(make_gather_hops(line_of(output), line_of(input), stamp));
    }
    return pipeline_.begin(std::move(call), std::move(hops));
  }

  /// Stores the stamp; ranks of one host compare it if their transport does.
  bool stamp_next(uint64_t stamp) override {
    stamps_.set(stamp);
    return false;
  }

  bool goes_on_alone() const override { return true; }

  void abort() override {
    pipeline_.abort();
    inner_->abort();
  }

  // ---- calls of the flat group

  WorkPtr broadcast(at::Tensor tensor, int root) override {
    return flat().broadcast(std::move(tensor), root);
  }
  WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) override {
    return flat().all_to_all(std::move(output), input);
  }
  WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                       const Counts& output_counts,
                       const Counts& input_counts) override {
    return flat().all_to_all_v(std::move(output), input, output_counts,
                               input_counts);
  }
  WorkPtr barrier() override { return flat().barrier(); }

 private:
  Communicator& flat() {
    if (const uint64_t stamp = stamps_.take()) inner_->stamp_next(stamp);
    return *inner_;
  }

  const std::shared_ptr<const GroupInfo> info_;
  const bool is_host_by_host_;
  NextStamps stamps_;
  PiecePipeline pipeline_;
};

}  // namespace

CommunicatorPtr make_hierarchical_communicator(HostGroups groups) {
  const auto& [flat, scatter, across, gather, is_host_by_host] = groups;
  SMP_CHECK_VALUE(flat && scatter && across && gather,
                  "make_hierarchical_communicator: expected four groups");
  SMP_CHECK_VALUE(scatter->size() >= 2 && across->size() >= 2 &&
                      scatter->size() * across->size() == flat->size() &&
                      gather->size() == scatter->size() &&
                      gather->group_rank() == scatter->group_rank(),
                  "make_hierarchical_communicator: ", across->size(),
                  " hosts with ", scatter->size(), " and ", gather->size(),
                  " ranks do not make up the ", flat->size(), " ranks of ",
                  flat->name());
  SMP_CHECK_VALUE(
      !is_host_by_host ||
          flat->group_rank() ==
              across->group_rank() * scatter->size() + scatter->group_rank(),
      "make_hierarchical_communicator: group rank ", flat->group_rank(), " of ",
      flat->name(), " is rank ", scatter->group_rank(), " of host ",
      across->group_rank(), ", which is not host by host");
  for (const CommunicatorPtr& group : {flat, scatter, across, gather}) {
    SMP_CHECK_VALUE(!group->is_stream_ordered(),
                    "make_hierarchical_communicator: ", group->name(),
                    " is of a device");
  }
  return std::make_shared<HierarchicalCommunicator>(std::move(groups));
}

}  // namespace smp::comm
