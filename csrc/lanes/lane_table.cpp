#include "csrc/lanes/lane_table.h"

#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/log.h"

namespace smp::lanes {
namespace {

// Least bytes for a slot; a small tensor would take it from a large one.
constexpr int64_t kMinSlotBytes = 64 << 10;

}  // namespace

LaneTable::LaneTable(const LaneOptions& options, int global_rank,
                     std::shared_ptr<health::FaultBoard> faults,
                     DeviceLane::SendReceipt receipts)
    : options_(options),
      device_(options.device),
      global_rank_(global_rank),
      host_(options.device) {
  LaneParts parts = options.source ? options.source->make(device_, global_rank,
                                                          faults, receipts)
                                   : parts_of_device(faults);
  if (parts.copies) {
    ipc_ = std::make_unique<IpcLane>(std::move(parts.copies), parts.ring,
                                     global_rank, faults, receipts);
  }
  if (parts.meetings) {
    nccl_ =
        std::make_unique<NcclLane>(std::move(parts.meetings), parts.channels,
                                   device_, global_rank, faults, receipts);
  }
  other_ = std::move(parts.other);
  if (!ipc_) why_no_ipc_ = std::move(parts.why_no_copies);
  if (!nccl_) why_no_nccl_ = std::move(parts.why_no_meetings);
}

LaneParts LaneTable::parts_of_device(
    const std::shared_ptr<health::FaultBoard>& faults) const {
  LaneParts parts{.ring = options_.ring};
  parts.why_no_meetings = "this build of torch has no NCCL";
  if (options_.mode == "host") return parts;
  parts.why_no_copies = "the devices are not CUDA's";
  if (device_.is_cpu()) parts.why_no_meetings = parts.why_no_copies;
  if (device_.is_cuda()) {
    parts.copies = make_cuda_copies(device_, parts.why_no_copies);
  }
  if (options_.groups.make) {
    parts.meetings =
        make_group_copies(device_, global_rank_, options_.groups, faults);
  }
  return parts;
}

void LaneTable::agree(const LaneExchange& exchange) {
  LaneFacts own{.mode = options_.mode,
                .machine = options_.machine,
                .pipeline = options_.pipeline,
                .why_not = why_no_ipc_,
                .why_no_nccl = why_no_nccl_,
                .nccl_host = options_.nccl_host,
                .slot_bytes = options_.ring.slot_bytes};
  try {
    if (ipc_) {
      own.device = ipc_->copies().device_name();
      own.reachable = ipc_->copies().reachable();
    }
  } catch (const Error& error) {
    own.why_not = error.what();
  }
  const std::string blocks = why_no_nccl_with(options_.launch_blocking);
  if (own.why_no_nccl.empty()) own.why_no_nccl = blocks;
  choices_ =
      agree_on_lanes(own, global_rank_, {ipc_.get(), nccl_.get()}, exchange);
  if (!blocks.empty() && nccl_) tell_launches_block(blocks);
}

void LaneTable::tell_launches_block(const std::string& reason) const {
  for (const LaneChoice& choice : choices_[global_rank_]) {
    if (choice.kind != LaneKind::kHost) continue;
    SMP_LOG(kWarning,
            "tensors for ranks whose device memory this rank cannot map go "
            "through the host, which is slower, and not over NCCL: ",
            reason, "; unset CUDA_LAUNCH_BLOCKING to use NCCL");
    return;
  }
}

bool LaneTable::takes(const at::Tensor& tensor) const {
  if (tensor.device().type() != device_.type()) return false;
  if (tensor.layout() != at::kStrided || tensor.is_quantized()) return false;
  // Takes tensors of any size: a copy into the message would wait for the
  // device.
  return tensor.nbytes() > 0;
}

Posted LaneTable::post(int dst, const at::Tensor& data, bool is_stable) {
  std::optional<Posted> posted = post_to_device(dst, data, is_stable);
  if (!posted) posted = host_.post(dst, data, is_stable);
  ++tensors_sent_;
  bytes_sent_ += posted->descriptor.num_bytes;
  return *std::move(posted);
}

// Posts over a lane with slots if one reaches `dst`, has room, and if the
// tensor is large enough.
std::optional<Posted> LaneTable::post_to_device(int dst, const at::Tensor& data,
                                                bool is_stable) {
  DeviceLane* lane = other_.get();
  const bool has_ring = ipc_ && ipc_->reaches(dst);
  if (has_ring || (nccl_ && nccl_->reaches(dst))) {
    const auto num_bytes = static_cast<int64_t>(data.nbytes());
    // Lanes of tests take all sizes, so that small models show errors.
    if (num_bytes < kMinSlotBytes && !options_.source) return std::nullopt;
    if (has_ring && !ipc_->fits(num_bytes)) {
      if (times_too_large_++ == 0) tell_too_large(num_bytes);
      return std::nullopt;
    }
    if (has_ring) {
      lane = ipc_.get();
    } else {
      lane = nccl_.get();
    }
  }
  if (lane == nullptr) return std::nullopt;
  std::optional<Posted> posted = lane->post(dst, data, is_stable);
  if (!posted) ++times_full_;
  return posted;
}

memory::Mark LaneTable::ask_to_leave(int dst, int num_turns) {
  SMP_ASSERT(nccl_, "copies have turns over NCCL only");
  return nccl_->ask_to_leave(dst, num_turns);
}

void LaneTable::tell_too_large(int64_t num_bytes) {
  if (options_.source) return;
  SMP_LOG(kWarning, "a tensor of ", num_bytes,
          " bytes for another rank is larger than a slot between devices (",
          options_.ring.slot_bytes,
          " bytes) and goes through the host, which is slower, as do all such "
          "tensors; set SMP_LANE_SLOT_MB to ",
          (num_bytes + (1 << 20) - 1) >> 20, " or more");
}

DeviceLane& LaneTable::lane_of(LaneKind kind) {
  switch (kind) {
    case LaneKind::kHost:
      return host_;
    case LaneKind::kFake:
      SMP_CHECK(other_,
                "a tensor comes over a lane that this rank does not have");
      return *other_;
    case LaneKind::kIpc:
      SMP_CHECK(ipc_,
                "a tensor comes through memory of another rank's device, which "
                "this rank has not mapped; ranks that run different versions "
                "of smp cannot work together");
      return *ipc_;
    case LaneKind::kNccl:
      SMP_CHECK(nccl_,
                "a tensor comes over NCCL, which this rank does not use; ranks "
                "that run different versions of smp cannot work together");
      return *nccl_;
  }
  SMP_ASSERT(false, "lane kind ", static_cast<int>(kind));
}

at::Tensor LaneTable::new_payload(const Descriptor& descriptor) {
  return lane_of(descriptor.lane).new_payload(descriptor);
}

bool LaneTable::take_may_block(const Descriptor& descriptor) {
  return lane_of(descriptor.lane).take_may_block();
}

memory::MarkedTensor LaneTable::take(int src, const Descriptor& descriptor,
                                     at::Tensor payload) {
  ++tensors_received_;
  return lane_of(descriptor.lane).take(src, descriptor, std::move(payload));
}

void LaneTable::acknowledge(int src, const Receipt& receipt) {
  lane_of(receipt.lane).acknowledge(src, receipt);
}

void LaneTable::stop() {
  host_.stop();
  if (other_) other_->stop();
  if (ipc_) ipc_->stop();
  if (nccl_) nccl_->stop();
}

LaneCounters LaneTable::counters() const {
  return {tensors_sent_, bytes_sent_, tensors_received_, times_full_,
          times_too_large_};
}

}  // namespace smp::lanes
