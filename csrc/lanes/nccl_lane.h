#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "csrc/health/fault_board.h"
#include "csrc/lanes/device_lane.h"
#include "csrc/lanes/meeting_copies.h"
#include "csrc/lanes/slot_ring.h"

namespace smp::lanes {

/// Most channels of a rank, in both directions. PyTorch hands out 32 streams of
/// high priority in turn, and no two channels may share one; the other groups
/// of a rank use the rest.
inline constexpr int kMaxChannels = 16;

struct ChannelOptions {
  int num_channels = 2;  ///< most channels of a pair in one direction
  /// Time to test all channels of a pair in one direction.
  std::chrono::milliseconds timeout = std::chrono::minutes(1);
};

/// Moves tensors between ranks that cannot map each other's memory.
///
/// A copy needs both ranks. The sender's part is enqueued when the tensor is
/// posted, and the receiver's part when the message has come, by a thread that
/// may block. A pair of ranks has a few channels in each direction, and a
/// channel has one copy at most. The next tensor takes a channel whose last
/// copy is over, or another lane if there is none. Thus no copy waits for an
/// earlier one, and may begin as soon as it is enqueued and its tensor is there
/// (docs/design/device_lanes.md has the reasons).
class NcclLane final : public DeviceLane {
 public:
  NcclLane(std::unique_ptr<MeetingCopies> copies, ChannelOptions options,
           c10::Device device, int global_rank,
           std::shared_ptr<health::FaultBoard> faults);
  ~NcclLane() override;

  /// Limits the number of channels by that of peers, the same on all ranks.
  /// @param max_peers  most peers of any rank, kMaxChannels / 2 at most
  void limit_channels(int max_peers);
  /// Returns data that peers need before `open`.
  /// @param peers  ranks that may send to this one and receive from it
  std::string offer(const std::vector<int>& peers);
  /// Makes the channels from one rank to another one, of which one is this
  /// rank, and tests them. Both call it, all ranks in the order of (src, dst).
  /// @throws Error when a channel does not carry the test's numbers in time
  void open(int src, int dst, const std::string& offer_of_peer);
  /// Restricts the lane to peers that have opened each other in both
  /// directions.
  void use_only(const std::vector<int>& peers);

  bool reaches(int dst) const { return peers_.count(dst) > 0; }

  std::optional<Posted> post(int dst, const at::Tensor& data,
                             bool is_stable) override;
  at::Tensor new_payload(const Descriptor& descriptor) const override;
  bool take_may_block() const override { return true; }
  memory::MarkedTensor take(int src, const Descriptor& descriptor,
                            at::Tensor payload) override;
  void acknowledge(int src, const Receipt& receipt) override;
  void stop() override;

 private:
  struct State {
    memory::Mark end;           // of its last copy; none: no copy yet
    bool is_enqueuing = false;  // a thread enqueues the next copy
  };

  std::optional<CopyChannel> reserve_channel(int dst, int64_t& sequence);
  void set_end(const CopyChannel& channel, const memory::Mark& end);
  void test_channel(const CopyChannel& channel);
  bool all_over() const;
  void wait_for(const memory::Mark& mark,
                std::chrono::steady_clock::time_point end) const;

  const std::unique_ptr<MeetingCopies> copies_;
  const ChannelOptions options_;
  const c10::Device device_;
  const int global_rank_;
  const std::shared_ptr<health::FaultBoard> faults_;
  // The next two members do not change after the first message.
  int num_channels_;
  std::set<int> peers_;
  ArrivalOrder arrivals_;
  std::atomic<bool> stopped_{false};

  mutable std::mutex mutex_;  // not held while a copy is asked for
  std::map<CopyChannel, State> channels_;
  std::map<int, int64_t> next_sequence_;  // by destination
};

}  // namespace smp::lanes
