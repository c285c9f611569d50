#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "csrc/health/fault_board.h"
#include "csrc/lanes/copy_turns.h"
#include "csrc/lanes/device_lane.h"
#include "csrc/lanes/meeting_copies.h"
#include "csrc/lanes/slot_ring.h"
#include "csrc/memory/copy_stream.h"

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
/// A copy needs both ranks. The receiver's part is enqueued when the message
/// has come, by a thread that may block; then the sender's part, by the lane's
/// own thread, when a receipt has come. All ranks enqueue copies in one order
/// (CopyTurns), so that devices cannot wait for each other in a circle even if
/// none of them runs two streams at once (docs/design/device_lanes.md). A pair
/// of ranks has a few channels in each direction, and a channel has one copy at
/// most. The next tensor takes a channel whose last copy is over, or another
/// lane if there is none.
class NcclLane final : public DeviceLane {
 public:
  NcclLane(std::unique_ptr<MeetingCopies> copies, ChannelOptions options,
           c10::Device device, int global_rank,
           std::shared_ptr<health::FaultBoard> faults, SendReceipt receipts);
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
  /// Asks for the turn of a message with `num_tensors` tensors of this lane.
  /// Call it once the rest of the message may leave, in the order of messages.
  /// @return when the message may leave
  memory::Mark ask_to_leave(int dst, int num_tensors);
  at::Tensor new_payload(const Descriptor& descriptor) const override;
  bool take_may_block() const override { return true; }
  memory::MarkedTensor take(int src, const Descriptor& descriptor,
                            at::Tensor payload) override;
  void acknowledge(int src, const Receipt& receipt) override;
  void stop() override;

 private:
  class SendEnd;
  // A tensor whose sending has not been enqueued.
  struct Sending {
    at::Tensor data = {};
    memory::Mark made = {};  // end of the work that makes the data
    std::shared_ptr<SendEnd> end = {};
  };
  struct State {
    memory::Mark end = {};     // of its last copy; none: no copy yet
    int64_t sequence = -1;     // of its last copy
    Sending sending = {};      // empty once it is enqueued
    bool has_receipt = false;  // the other rank has enqueued its part
  };

  std::optional<CopyChannel> find_channel_locked(int dst);
  void send_asked();
  void send_now(const CopyChannel& channel);
  bool begin_receive(int src);
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
  const SendReceipt receipts_;
  memory::CopyStream sending_;  // waits for tensors that are to be sent
  std::atomic<bool> stopped_{false};

  mutable std::mutex mutex_;  // not held while a copy is enqueued
  std::condition_variable changed_;
  std::map<CopyChannel, State> channels_;
  std::map<int, int64_t> next_sequence_;  // by destination
  CopyTurns turns_;
  std::deque<CopyChannel> ready_;  // to send, in this order
  bool is_ending_ = false;
  std::thread sender_;  // begins with the first tensor
};

}  // namespace smp::lanes
