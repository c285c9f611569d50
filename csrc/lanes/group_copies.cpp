#include "csrc/lanes/group_copies.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/without_throwing.h"
#include "csrc/memory/device_scope.h"

namespace smp::lanes {
namespace {

using memory::Mark;
using memory::MarkedTensor;

// Group ranks of the two ends of a channel.
constexpr int kSource = 0;
constexpr int kDestination = 1;
constexpr int kTag = 0;

// The end of an operation of a group, as an event.
class OperationEnd final : public Mark::Event {
 public:
  /// @param tensor  tensor that the operation reads or writes
  OperationEnd(comm::WorkPtr work, at::Tensor tensor,
               std::shared_ptr<health::FaultBoard> faults)
      : work_(std::move(work)),
        faults_(std::move(faults)),
        tensor_(std::move(tensor)) {}

  // Called even if the operation is over: a failed operation throws here. Does
  // not hold the lock: a backend may hold the host here until the watch, which
  // calls `is_over`, aborts its group.
  void block(const c10::Stream& stream) const override {
    const memory::DeviceScope scope(
        stream.device().is_cpu() ? std::nullopt : std::optional(stream));
    try {
      SMP_ASSERT(work_->order_stream(), "an operation without a stream");
    } catch (const std::exception&) {
      faults_->raise_if_faulted();  // the reason
      throw;
    }
  }

  bool is_over() const override {
    if (!work_->done()) return false;
    const std::lock_guard lock(mutex_);
    tensor_.reset();
    return true;
  }

 private:
  const comm::WorkPtr work_;
  const std::shared_ptr<health::FaultBoard> faults_;
  mutable std::mutex mutex_;  // of the tensor
  mutable at::Tensor tensor_;
};

// Returns the bytes of a tensor, because no backend supports all types.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.detach().view({-1}).view(at::kByte);
}

class GroupCopies final : public MeetingCopies {
 public:
  GroupCopies(c10::Device device, int global_rank, GroupOptions options,
              std::shared_ptr<health::FaultBoard> faults)
      : device_(device),
        global_rank_(global_rank),
        options_(std::move(options)),
        faults_(std::move(faults)) {
    // The receiving stream gets no other work, so that no receive waits for
    // any.
    if (!device.is_cpu()) {
      receiving_ = c10::impl::VirtualGuardImpl(device.type())
                       .getStreamFromGlobalPool(device);
    }
  }

  // Returns nothing: groups find each other by the store of the run.
  std::string offer(const std::vector<CopyChannel>& /*channels*/) override {
    return {};
  }

  void connect(const CopyChannel& channel,
               const std::string& /*offer_of_peer*/) override {
    const comm::CommunicatorPtr group = options_.make(channel);
    SMP_CHECK(group && group->size() == 2 && group->is_stream_ordered(),
              "a channel between devices needs a group of two ranks that is "
              "ordered by streams, got ",
              group ? group->name() : "none");
    const int own = channel.src == global_rank_ ? kSource : kDestination;
    SMP_CHECK(group->group_rank() == own, group->name(), ": expected rank ",
              own, " of the group, got ", group->group_rank());
    if (options_.flights) options_.flights->add_group(group);
    const std::lock_guard lock(mutex_);
    SMP_CHECK(!is_stopped_, "the lane is closed");
    channels_[channel].group = group;
  }

  Mark send(const CopyChannel& channel, const at::Tensor& data) override {
    return enqueue(channel, "send", data, [&](comm::Communicator& group) {
      return group.send(as_bytes(data), kDestination, kTag);
    });
  }

  MarkedTensor receive(const CopyChannel& channel, at::IntArrayRef sizes,
                       at::ScalarType dtype) override {
    const memory::DeviceScope scope(receiving_);
    MarkedTensor result{
        at::empty(sizes, at::TensorOptions(dtype).device(device_))};
    result.mark = enqueue(
        channel, "receive", result.data, [&](comm::Communicator& group) {
          return group.recv(as_bytes(result.data), kSource, kTag);
        });
    return result;
  }

  void stop() override {
    std::vector<comm::CommunicatorPtr> in_flight;
    {
      const std::lock_guard lock(mutex_);
      is_stopped_ = true;
      for (const auto& [channel, end] : channels_) {
        if (end.num_enqueuing > 0 || !is_over(end.last)) {
          in_flight.push_back(end.group);
        }
      }
    }
    for (const comm::CommunicatorPtr& group : in_flight) {
      without_throwing("the abort of a group", [&] { group->abort(); });
    }
  }

 private:
  struct ChannelEnd {
    comm::CommunicatorPtr group;
    Mark last;
    int num_enqueuing = 0;  // calls that may be blocked
  };

  static bool is_over(const Mark& mark) {
    try {
      return mark.is_over();
    } catch (const std::exception&) {
      return true;  // it has failed
    }
  }

  // Enqueues a copy without the lock, since the call may block until `stop`.
  template <typename Call>
  Mark enqueue(const CopyChannel& channel, const char* what,
               const at::Tensor& tensor, const Call& call) {
    comm::CommunicatorPtr group;
    {
      const std::lock_guard lock(mutex_);
      SMP_CHECK(!is_stopped_, "a copy was asked for after its lane was closed");
      ChannelEnd& end = channels_.at(channel);
      group = end.group;
      ++end.num_enqueuing;
    }
    std::shared_ptr<const OperationEnd> event;
    std::exception_ptr failure;
    try {
      event =
          std::make_shared<const OperationEnd>(call(*group), tensor, faults_);
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    ChannelEnd& end = channels_.at(channel);
    --end.num_enqueuing;
    if (failure) std::rethrow_exception(failure);
    end.last = Mark(event);
    if (options_.flights) {
      options_.flights->add(
          {.is_over = [event] { return event->is_over(); },
           .what = detail::concat(what, " over ", group->name()),
           .ranks = {channel.src, channel.dst}});
    }
    return end.last;
  }

  const c10::Device device_;
  const int global_rank_;
  const GroupOptions options_;
  const std::shared_ptr<health::FaultBoard> faults_;
  std::optional<c10::Stream> receiving_;  // none on the CPU
  std::mutex mutex_;
  bool is_stopped_ = false;
  std::map<CopyChannel, ChannelEnd> channels_;
};

}  // namespace

std::unique_ptr<MeetingCopies> make_group_copies(
    c10::Device device, int global_rank, GroupOptions options,
    std::shared_ptr<health::FaultBoard> faults) {
  SMP_ASSERT(options.make, "groups that nobody makes");
  return std::make_unique<GroupCopies>(device, global_rank, std::move(options),
                                       std::move(faults));
}

}  // namespace smp::lanes
