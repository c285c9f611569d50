#include "csrc/lanes/lane_table.h"

#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/log.h"
#include "csrc/lanes/fake_copies.h"
#include "csrc/lanes/fake_meeting.h"

namespace smp::lanes {
namespace {

// A slot that holds fewer bytes is missing for a large tensor.
constexpr int64_t kMinSlotBytes = 64 << 10;

}  // namespace

LaneTable::LaneTable(const LaneOptions& options, int global_rank,
                     std::shared_ptr<health::FaultBoard> faults,
                     DeviceLane::SendReceipt receipts)
    : options_(options),
      device_(options.device),
      global_rank_(global_rank),
      host_(options.device) {
  const auto& fake = options.fake;
  SMP_CHECK_VALUE(!fake || device_.is_cpu(),
                  "a fake lane carries tensors of the CPU, this rank works on ",
                  device_, "; unset SMP_TEST_LANES");
  why_no_nccl_ = "this build of torch has no NCCL";
  if (fake) {
    make_fakes(faults, receipts);
  } else if (options.mode != "host") {
    if (auto copies = make_cuda_copies(device_, why_no_ipc_)) {
      ipc_ = std::make_unique<IpcLane>(std::move(copies), options.ring,
                                       global_rank, faults, receipts);
    }
    if (options.groups.make) {
      nccl_ = std::make_unique<NcclLane>(
          make_group_copies(device_, global_rank, options.groups, faults),
          WayOptions{}, device_, global_rank, faults);
      why_no_nccl_.clear();
    }
  }
}

void LaneTable::make_fakes(const std::shared_ptr<health::FaultBoard>& faults,
                           const DeviceLane::SendReceipt& receipts) {
  const FakeOptions& fake = *options_.fake;
  if (fake.has_ring) {
    ipc_ = std::make_unique<IpcLane>(
        make_fake_copies(fake, global_rank_, faults),
        RingOptions{.num_slots = fake.num_slots, .slot_bytes = fake.slot_bytes},
        global_rank_, faults, receipts);
  } else {
    why_no_ipc_ = "the lanes of this test map no memory";
  }
  if (fake.has_meeting) {
    nccl_ = std::make_unique<NcclLane>(
        make_fake_meeting(fake, global_rank_, faults),
        WayOptions{.num_ways = fake.num_slots}, device_, global_rank_, faults);
    why_no_nccl_.clear();
  }
  if (!ipc_ && !nccl_) {
    fake_ = std::make_unique<FakeLane>(fake, global_rank_, faults, receipts);
  }
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
  choices_ =
      agree_on_lanes(own, global_rank_, {ipc_.get(), nccl_.get()}, exchange);
}

bool LaneTable::takes(const at::Tensor& tensor) const {
  if (tensor.device().type() != device_.type()) return false;
  if (tensor.layout() != at::kStrided || tensor.is_quantized()) return false;
  // However few: a copy into the message would wait for the device.
  return tensor.nbytes() > 0;
}

Posted LaneTable::post(int dst, const at::Tensor& data, bool is_stable) {
  std::optional<Posted> posted = post_to_device(dst, data, is_stable);
  if (!posted) posted = host_.post(dst, data, is_stable);
  ++tensors_sent_;
  bytes_sent_ += posted->descriptor.num_bytes;
  return *std::move(posted);
}

// Over a lane with slots, if there is one to `dst`, room, and enough to carry.
std::optional<Posted> LaneTable::post_to_device(int dst, const at::Tensor& data,
                                                bool is_stable) {
  DeviceLane* lane = fake_.get();
  const bool has_ring = ipc_ && ipc_->reaches(dst);
  if (has_ring || (nccl_ && nccl_->reaches(dst))) {
    const auto num_bytes = static_cast<int64_t>(data.nbytes());
    // Those of tests take all, so that small models show what goes wrong.
    if (num_bytes < kMinSlotBytes && !options_.fake) return std::nullopt;
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

void LaneTable::tell_too_large(int64_t num_bytes) {
  if (options_.fake) return;
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
      SMP_CHECK(fake_,
                "a tensor comes over a fake lane, which this rank does not "
                "have; set SMP_TEST_LANES on all ranks or on none");
      return *fake_;
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
  if (fake_) fake_->stop();
  if (ipc_) ipc_->stop();
  if (nccl_) nccl_->stop();
}

LaneCounters LaneTable::counters() const {
  return {tensors_sent_, bytes_sent_, tensors_received_, times_full_,
          times_too_large_};
}

}  // namespace smp::lanes
