#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/health/fault_board.h"
#include "csrc/shm/doorbell.h"
#include "csrc/shm/shared_ring.h"

namespace smp::shm {

/// Memory that this rank shares with other ranks of its host: a ring to and
/// from each of them, and the doorbells of the two threads that serve all of
/// them. It has no name that could outlive the processes.
class SharedMemory {
 public:
  static constexpr int kReceiveBell = 0;
  static constexpr int kSendBell = 1;
  struct Peer {
    int global_rank;
    RingWriter to;
    RingReader from;
  };
  /// An owner that keeps one mapping.
  using Mapping = std::shared_ptr<void>;

  /// @param own_bells  receiving thread, sending thread; in `mappings` too
  SharedMemory(std::vector<Mapping> mappings, Doorbell* own_bells,
               std::vector<Peer> peers);

  /// Returns global ranks, ascending.
  std::vector<int> peers() const;

  /// Returns the ends of the rings, for the one mailbox that uses them.
  /// @throws Error the second time
  std::vector<Peer> take_peers();
  Doorbell& receive_bell() { return own_bells_[kReceiveBell]; }
  Doorbell& send_bell() { return own_bells_[kSendBell]; }

 private:
  const std::vector<Mapping> mappings_;
  Doorbell* const own_bells_;
  std::vector<Peer> peers_;
  std::vector<int> peer_ranks_;
  bool is_taken_ = false;
};

using SharedMemoryPtr = std::shared_ptr<SharedMemory>;

struct SharedMemoryOptions {
  /// Set if this rank shares memory.
  bool enabled = true;
  /// Size of each ring from another rank to this one.
  int64_t ring_bytes = 8 << 20;
  /// Words equal on ranks that try to share; trying shows whether they can.
  std::string machine = {};
  /// Time-out of each exchange with the other ranks.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// Makes the shared memory. Collective over `world`, which nothing else may use
/// meanwhile. Two ranks share memory when each has opened the other's and found
/// the other's data in it. This needs the same machine, user and process
/// namespace. When ranks of one machine cannot share, rank 0 logs why.
/// @throws PeerFailure when another rank fails meanwhile
SharedMemoryPtr connect_shared_memory(comm::Communicator& world,
                                      health::FaultBoard& faults,
                                      const SharedMemoryOptions& options);

}  // namespace smp::shm
