#include "csrc/comm/watched_communicator.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "csrc/comm/forwarding_communicator.h"
#include "csrc/common/check.h"

namespace smp::comm {
namespace {

// An FNV-1a hash, equal on all hosts and in all builds, unlike std::hash.
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

// Returns a test for whether the device has passed the work that its current
// stream has now. If the device is the host, tests the operation itself.
std::function<bool()> probe_of(const c10::Device& device, const WorkPtr& work) {
  if (device.is_cpu()) return [work] { return work->done(); };
  const c10::impl::VirtualGuardImpl impl(device.type());
  auto mark = std::make_shared<c10::Event>(device.type());
  mark->record(impl.getStream(device));
  return [mark] { return mark->query(); };
}

// A collective of a device, watched from the time when the host goes on without
// it.
class WatchedWork final : public Work {
 public:
  WatchedWork(WorkPtr inner, FlightWatchPtr flights, c10::Device device,
              std::string what)
      : inner_(std::move(inner)),
        flights_(std::move(flights)),
        device_(device),
        what_(std::move(what)) {}

  bool done() override { return inner_->done(); }
  void wait(std::chrono::milliseconds timeout) override {
    inner_->wait(timeout);
  }
  void abort() override { inner_->abort(); }

  bool order_stream() override {
    if (!inner_->order_stream()) return false;
    if (is_watched_.exchange(true)) return true;
    flights_->add({.is_over = probe_of(device_, inner_),
                   .what = what_,
                   .ranks = collective()->ranks,
                   .collective = collective()});
    return true;
  }

 private:
  const WorkPtr inner_;
  const FlightWatchPtr flights_;
  const c10::Device device_;
  const std::string what_;
  std::atomic<bool> is_watched_ = false;
};

class WatchedCommunicator final : public ForwardingCommunicator {
 public:
  WatchedCommunicator(CommunicatorPtr inner,
                      std::shared_ptr<health::FaultBoard> faults,
                      std::vector<int> ranks, FlightWatchPtr flights)
      : ForwardingCommunicator(std::move(inner)),
        faults_(std::move(faults)),
        ranks_(std::move(ranks)),
        flights_(inner_->is_stream_ordered() ? std::move(flights) : nullptr) {
    Hash hash;
    hash.add(inner_->name());
    for (const int rank : ranks_) hash.add(rank);
    group_ = hash.value();
    words_ = std::make_shared<const std::string>(
        detail::concat(name(), " (", size(), " ranks)"));
    if (flights_) flights_->add_group(inner_);
  }

  WorkPtr send(const at::Tensor& tensor, int dst, int tag) override {
    return in_care("send", inner_->send(tensor, dst, tag));
  }
  WorkPtr recv(at::Tensor tensor, int src, int tag) override {
    return in_care("recv", inner_->recv(std::move(tensor), src, tag));
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
  WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                       const Counts& output_counts,
                       const Counts& input_counts) override {
    // The sizes differ from rank to rank.
    return issue(
        "all_to_all_v", output, 0,
        [&] {
          return inner_->all_to_all_v(output, input, output_counts,
                                      input_counts);
        },
        std::max(output.nbytes(), input.nbytes()), /*sizes_are_equal=*/false);
  }
  WorkPtr barrier() override {
    return issue("barrier", at::Tensor(), 0, [&] { return inner_->barrier(); });
  }

 private:
  WorkPtr in_care(std::string_view operation, WorkPtr work) const {
    work->set_wait_context({faults_, operation, words_});
    return work;
  }

  // Numbers the call under the same lock as the call itself, so that both have
  // one order on every rank.
  template <typename Start>
  WorkPtr issue(std::string_view operation, const at::Tensor& tensor,
                int64_t detail, Start&& start) {
    const size_t num_bytes = tensor.defined() ? tensor.nbytes() : 0;
    return issue(operation, tensor, detail, start, num_bytes,
                 /*sizes_are_equal=*/true);
  }

  template <typename Start>
  WorkPtr issue(std::string_view operation, const at::Tensor& tensor,
                int64_t detail, Start&& start, size_t num_bytes,
                bool sizes_are_equal) {
    health::CollectiveId id;
    id.group = group_;
    id.ranks = ranks_;
    id.goes_on_alone = inner_->goes_on_alone();
    id.num_bytes = static_cast<int64_t>(num_bytes);
    const int64_t common_bytes = sizes_are_equal ? id.num_bytes : -1;
    id.signature = Hash().add(operation).add(detail).add(common_bytes).value();
    if (flights_) faults_->raise_if_faulted();
    // Read before the start, which may move the tensor away.
    std::optional<c10::Device> device;
    if (flights_ && tensor.defined()) device = tensor.device();
    std::lock_guard lock(mutex_);
    faults_->waits().collectives().enter(id);
    WorkPtr work = start();
    if (device) {
      work = std::make_shared<WatchedWork>(
          std::move(work), flights_, *device,
          detail::concat(operation, " over ", name(), " (", size(), " ranks)"));
    }
    work->set_collective(std::move(id));
    return in_care(operation, std::move(work));
  }

  const std::shared_ptr<health::FaultBoard> faults_;
  const std::vector<int> ranks_;
  const FlightWatchPtr flights_;  // of a device only
  uint64_t group_ = 0;
  std::shared_ptr<const std::string> words_;
  std::mutex mutex_;
};

}  // namespace

CommunicatorPtr make_watched_communicator(
    CommunicatorPtr inner, std::shared_ptr<health::FaultBoard> faults,
    std::vector<int> ranks, FlightWatchPtr flights) {
  SMP_CHECK_VALUE(inner && faults,
                  "make_watched_communicator: expected a communicator and a "
                  "fault board, got none");
  SMP_CHECK_VALUE(static_cast<int>(ranks.size()) == inner->size(),
                  "make_watched_communicator: expected ", inner->size(),
                  " ranks, got ", ranks.size());
  return std::make_shared<WatchedCommunicator>(
      std::move(inner), std::move(faults), std::move(ranks),
      std::move(flights));
}

}  // namespace smp::comm
