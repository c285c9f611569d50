#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/health/fault_board.h"
#include "csrc/lanes/device_copies.h"
#include "csrc/lanes/device_lane.h"
#include "csrc/lanes/slot_ring.h"

namespace smp::lanes {

struct RingOptions {
  int num_slots = 4;  ///< for all tensors that one rank has in flight
  int64_t slot_bytes = 128 << 20;
};

/// Moves tensors between processes of one host, through a ring of slots in
/// memory of the sender's device, which the receivers have mapped.
///
/// The sender copies into a free slot on its copy stream and records an event
/// of the slot. The receiver's copy stream waits for the event, copies into a
/// tensor of its own, and records an event of the receiver. The receipt is sent
/// once this work is enqueued. The next copy into the slot waits, on the
/// device, for the receiver's event. Each event is recorded before the message
/// about it leaves, so each wait finds its record.
class IpcLane final : public DeviceLane {
 public:
  IpcLane(std::unique_ptr<DeviceCopies> copies, RingOptions options,
          int global_rank, std::shared_ptr<health::FaultBoard> faults,
          SendReceipt receipts);
  ~IpcLane() override;

  /// Makes the ring and all events of this rank. Call it before the first
  /// message.
  /// @param peers  ranks that may send to this one and receive from it
  /// @return handles for the peers, a byte string without secrets
  /// @throws Error when the device has no room
  std::string offer(const std::vector<int>& peers);
  /// Opens a peer's offer, and tests whether it can be read.
  /// @throws Error when it cannot be read
  void open(int peer, const std::string& offer);
  /// Restricts the lane to peers that have opened each other.
  void use_only(const std::vector<int>& peers);

  DeviceCopies& copies() { return *copies_; }
  bool reaches(int dst) const { return peers_.count(dst) > 0; }
  bool fits(int64_t num_bytes) const {
    return num_bytes <= options_.slot_bytes;
  }

  std::optional<Posted> post(int dst, const at::Tensor& data,
                             bool is_stable) override;
  at::Tensor new_payload(const Descriptor& descriptor) const override;
  memory::MarkedTensor take(int src, const Descriptor& descriptor,
                            at::Tensor payload) override;
  void acknowledge(int src, const Receipt& receipt) override;
  void stop() override;

 private:
  // Indices are slots.
  using Events = std::vector<SharedEventPtr>;
  struct Peer {
    DeviceMemory ring;    // of the peer
    Events written;       // of the peer: its slots are full
    Events read_here;     // of this rank: its copies out of them are over
    Events read_by_peer;  // of the peer: likewise of this rank's slots
  };

  Events new_events();
  Peer& peer_of(int global_rank);
  bool end_copies();
  void release();

  const std::unique_ptr<DeviceCopies> copies_;
  const RingOptions options_;
  const int global_rank_;
  const std::shared_ptr<health::FaultBoard> faults_;
  const SendReceipt receipts_;
  SlotRing slots_;
  ArrivalOrder arrivals_;
  std::map<int, Peer> peers_;  // does not change after the first message

  std::mutex out_mutex_;
  DeviceMemory ring_;
  Events written_;
  std::vector<int> last_reader_;  // of a slot; -1: none
  std::mutex in_mutex_;
  bool stopped_ = false;  // with `in_mutex_`
};

}  // namespace smp::lanes
