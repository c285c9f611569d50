#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "csrc/comm/incoming_message.h"
#include "csrc/comm/link.h"
#include "csrc/comm/shared_memory.h"
#include "csrc/comm/wire.h"

namespace smp::comm {

/// Messages through shared memory, one copy in and one copy out.
///
/// `post` writes straight into the ring of the receiver. What does not fit is
/// kept and finished by one sending thread; until then later messages to that
/// rank queue behind it. One receiving thread serves all peers: it sleeps at
/// one doorbell, puts the pieces of long messages together in turns, and runs
/// the handlers. A message that arrives while it sleeps costs one wake-up. It
/// does not spin first: the wake-up takes 5 to 10 us, and spinning, even only
/// in the middle of a long message, takes more from the cores that compute.
///
/// That a peer has died is not seen here; the liveness channel tells.
class SharedMemoryLink final : public Link {
 public:
  SharedMemoryLink(SharedMemoryPtr memory, LinkOwner owner);

  void post(int dst, Message message) override;
  void stop() override;

 private:
  using Clock = std::chrono::steady_clock;

  // Bytes that wait for room in a ring.
  struct Piece {
    at::Tensor owner;
    const uint8_t* begin;
    size_t size;
  };
  struct Outgoing {
    std::deque<Piece> pieces;
    Clock::time_point posted;
  };
  struct Peer {
    explicit Peer(SharedMemory::Peer ends);

    const int global_rank;
    // Written to with `mutex` held while `backlog` is empty, else by the
    // sending thread only.
    RingWriter to;
    std::mutex mutex;
    std::deque<Outgoing> backlog;
    std::vector<uint8_t> scratch;
    uint64_t next_sequence = 0;
    // Of the receiving thread.
    RingReader from;
    IncomingMessage incoming;
    bool is_broken = false;
  };

  void publish(Peer& peer);
  size_t write_pieces(Peer& peer, const uint8_t* from, size_t size);
  void write_or_keep(Peer& peer, const wire::Parts& parts);
  Outgoing* first_unsent(Peer& peer);
  bool send_some(Peer& peer, Outgoing& outgoing);
  bool is_given_up(const Peer& peer, const Outgoing& outgoing) const;
  void end_first(Peer& peer);
  void send_backlogs();
  bool send_round();
  bool must_send();

  void receive_all();
  bool receive_round();
  bool receive_some(Peer& peer);
  bool has_arrivals();

  const SharedMemoryPtr memory_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<int, Peer*> peer_of_;  // by global rank
  int fault_subscription_ = -1;
  std::atomic<bool> stopping_{false};
  std::thread receiver_;
  std::thread sender_;
};

}  // namespace smp::comm
