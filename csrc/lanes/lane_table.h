#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "csrc/common/accelerator.h"
#include "csrc/health/fault_board.h"
#include "csrc/lanes/device_lane.h"
#include "csrc/lanes/group_copies.h"
#include "csrc/lanes/host_lane.h"
#include "csrc/lanes/ipc_lane.h"
#include "csrc/lanes/lane_agreement.h"
#include "csrc/lanes/nccl_lane.h"

namespace smp::lanes {

/// The parts of one rank's lanes besides the host lane; null: it has none.
struct LaneParts {
  std::unique_ptr<DeviceCopies> copies = {};     ///< for an IpcLane
  std::unique_ptr<MeetingCopies> meetings = {};  ///< for an NcclLane
  std::unique_ptr<DeviceLane> other = {};        ///< takes other tensors
  RingOptions ring = {};
  ChannelOptions channels = {};
  std::string why_no_copies = {};    ///< if there are none
  std::string why_no_meetings = {};  ///< if there are none
};

/// Makes parts that replace those of a device.
struct LaneSource {
  std::function<LaneParts(c10::Device device, int global_rank,
                          const std::shared_ptr<health::FaultBoard>& faults,
                          const DeviceLane::SendReceipt& receipts)>
      make;
  /// Set if ranks have to agree on these lanes.
  bool needs_agreement = false;
};

struct LaneOptions {
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< of this rank
  /// Replacement of the device's lanes.
  std::optional<LaneSource> source = {};
  std::string mode = "auto";         ///< SMP_LANE
  GroupOptions groups = {};          ///< of NCCL
  std::string nccl_host = {};        ///< NCCL_HOSTID
  std::string launch_blocking = {};  ///< CUDA_LAUNCH_BLOCKING
  std::string machine = {};          ///< equal on ranks of one host
  int pipeline = 0;  ///< equal on ranks that send tensors to each other
  RingOptions ring = {};
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< to agree

  /// Returns whether there are lanes. Tensors of accelerators use them; all
  /// others travel in messages.
  bool has_lanes() const {
    return source.has_value() || is_accelerator(device);
  }
  /// Returns whether ranks have to agree on the lanes (`LaneTable::agree`).
  bool needs_agreement() const {
    return source ? source->needs_agreement : is_accelerator(device);
  }
};

/// The lanes of one rank: chooses the tensors they take, and the lane for each.
/// Thread-safe.
class LaneTable {
 public:
  LaneTable(const LaneOptions& options, int global_rank,
            std::shared_ptr<health::FaultBoard> faults,
            DeviceLane::SendReceipt receipts);

  /// Opens the lanes that this rank and others can use together; collective,
  /// before the first message. Without it all tensors use the host lane.
  /// @throws ValueError on all ranks when SMP_LANE demands an impossible lane
  void agree(const LaneExchange& exchange);
  /// Returns the agreed choices; empty before.
  const LaneChoices& choices() const { return choices_; }

  /// Returns whether a tensor that is sent to another rank leaves its message.
  bool takes(const at::Tensor& tensor) const;
  /// Posts a tensor; see DeviceLane. Without a free slot the host lane takes
  /// it.
  Posted post(int dst, const at::Tensor& data, bool is_stable);
  /// Asks whether a message may leave that has `num_turns` tensors whose copies
  /// have turns. Call it once the rest of the message may, in the order of
  /// messages. @return when it may leave
  memory::Mark ask_to_leave(int dst, int num_turns);
  at::Tensor new_payload(const Descriptor& descriptor);
  bool take_may_block(const Descriptor& descriptor);
  memory::MarkedTensor take(int src, const Descriptor& descriptor,
                            at::Tensor payload);
  void acknowledge(int src, const Receipt& receipt);
  void stop();

  LaneCounters counters() const;

 private:
  LaneParts parts_of_device(
      const std::shared_ptr<health::FaultBoard>& faults) const;
  DeviceLane& lane_of(LaneKind kind);
  std::optional<Posted> post_to_device(int dst, const at::Tensor& data,
                                       bool is_stable);
  void tell_too_large(int64_t num_bytes);
  void tell_launches_block(const std::string& reason) const;

  const LaneOptions options_;
  const c10::Device device_;
  const int global_rank_;
  HostLane host_;
  std::unique_ptr<IpcLane> ipc_;       // null: there is none
  std::unique_ptr<NcclLane> nccl_;     // likewise
  std::unique_ptr<DeviceLane> other_;  // likewise
  std::string why_no_ipc_;
  std::string why_no_nccl_;
  LaneChoices choices_;
  std::atomic<int64_t> tensors_sent_{0};
  std::atomic<int64_t> bytes_sent_{0};
  std::atomic<int64_t> tensors_received_{0};
  std::atomic<int64_t> times_full_{0};
  std::atomic<int64_t> times_too_large_{0};
};

}  // namespace smp::lanes
