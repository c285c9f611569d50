#include "csrc/comm/watched_communicator.h"

#include <algorithm>
#include <mutex>
#include <string_view>
#include <utility>

#include "csrc/common/check.h"

namespace smp::comm {
namespace {

// FNV-1a: equal on all hosts and in all builds, unlike std::hash.
class Hash {
 public:
  Hash& add(std::string_view text) {
    for (const char letter : text) add_byte(static_cast<uint8_t>(letter));
    return add(static_cast<int64_t>(text.size()));
  }
  Hash& add(int64_t number) {
    for (int shift = 0; shift < 64; shift += 8) {
      add_byte(static_cast<uint8_t>(number >> shift));
    }
    return *this;
  }
  uint64_t value() const { return value_; }

 private:
  void add_byte(uint8_t byte) {
    value_ = (value_ ^ byte) * uint64_t{0x100000001b3};
  }
  uint64_t value_ = 0xcbf29ce484222325;
};

class WatchedCommunicator final : public Communicator {
 public:
  WatchedCommunicator(CommunicatorPtr inner,
                      std::shared_ptr<health::FaultBoard> faults,
                      std::vector<int> ranks)
      : inner_(std::move(inner)),
        faults_(std::move(faults)),
        ranks_(std::move(ranks)) {
    Hash hash;
    hash.add(inner_->name());
    for (const int rank : ranks_) hash.add(rank);
    group_ = hash.value();
  }

  int group_rank() const override { return inner_->group_rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }

  WorkPtr send(const at::Tensor& tensor, int dst, int tag) override {
    return inner_->send(tensor, dst, tag);
  }
  WorkPtr recv(at::Tensor tensor, int src, int tag) override {
    return inner_->recv(std::move(tensor), src, tag);
  }
  WorkPtr recv_any(at::Tensor tensor, int tag) override {
    return inner_->recv_any(std::move(tensor), tag);
  }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    return issue("all_reduce", tensor, static_cast<int>(op),
                 [&] { return inner_->all_reduce(std::move(tensor), op); });
  }
  WorkPtr broadcast(at::Tensor tensor, int root) override {
    return issue("broadcast", tensor, root,
                 [&] { return inner_->broadcast(std::move(tensor), root); });
  }
  WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override {
    return issue("all_gather", output, 0,
                 [&] { return inner_->all_gather(std::move(output), input); });
  }
  WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                         ReduceOp op) override {
    return issue("reduce_scatter", input, static_cast<int>(op), [&] {
      return inner_->reduce_scatter(std::move(output), input, op);
    });
  }
  WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) override {
    return issue("all_to_all", output, 0,
                 [&] { return inner_->all_to_all(std::move(output), input); });
  }
  WorkPtr barrier() override {
    return issue("barrier", at::Tensor(), 0, [&] { return inner_->barrier(); });
  }

  bool stamp_next(uint64_t stamp) override { return inner_->stamp_next(stamp); }
  bool goes_on_alone() const override { return inner_->goes_on_alone(); }
  void abort() override { inner_->abort(); }

 private:
  // The number is given under the lock under which the call is made, so that
  // both have one order on every rank.
  template <typename Start>
  WorkPtr issue(std::string_view operation, const at::Tensor& tensor,
                int64_t detail, Start&& start) {
    health::CollectiveId id;
    id.group = group_;
    id.ranks = ranks_;
    id.goes_on_alone = inner_->goes_on_alone();
    id.num_bytes = tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
    id.signature = Hash().add(operation).add(detail).add(id.num_bytes).value();
    std::lock_guard lock(mutex_);
    faults_->waits().collectives().enter(id);
    WorkPtr work = start();
    work->set_collective(std::move(id));
    return work;
  }

  const CommunicatorPtr inner_;
  const std::shared_ptr<health::FaultBoard> faults_;
  const std::vector<int> ranks_;
  uint64_t group_ = 0;
  std::mutex mutex_;
};

}  // namespace

CommunicatorPtr make_watched_communicator(
    CommunicatorPtr inner, std::shared_ptr<health::FaultBoard> faults,
    std::vector<int> ranks) {
  SMP_CHECK_VALUE(inner && faults,
                  "make_watched_communicator: expected a communicator and a "
                  "fault board, got none");
  SMP_CHECK_VALUE(static_cast<int>(ranks.size()) == inner->size(),
                  "make_watched_communicator: expected ", inner->size(),
                  " ranks, got ", ranks.size());
  return std::make_shared<WatchedCommunicator>(
      std::move(inner), std::move(faults), std::move(ranks));
}

}  // namespace smp::comm
