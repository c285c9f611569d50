#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "csrc/mailbox/incoming_message.h"
#include "csrc/mailbox/link.h"
#include "csrc/mailbox/wire.h"
#include "csrc/shm/shared_memory.h"

namespace at {
class ThreadLocalState;
}

namespace smp::mailbox {

/// Sends messages through shared memory, with one copy in and one copy out.
///
/// `post` writes directly into the ring of the receiver. Bytes that do not fit
/// are kept, and one sending thread writes them; until then later messages to
/// that rank queue behind them. One thread at a time serves all peers: it
/// sleeps at one doorbell, assembles the pieces of long messages in turns, and
/// runs the handlers. This is the receiving thread, unless a thread that waits
/// for a message helps: the message then wakes that thread directly. While it
/// is the only thread of its rank that could run, it spins for the next message
/// for a moment before it sleeps. The receiving thread does not spin: that
/// would cost computing threads more than it saves. Source: "Leader/Followers",
/// Schmidt et al., 2000; the seats are ours.
///
/// The link does not notice the death of a peer; the liveness channel reports
/// it.
class SharedMemoryLink final : public Link {
 public:
  SharedMemoryLink(shm::SharedMemoryPtr memory, LinkOwner owner);

  void post(int dst, Message message) override;
  bool help_until(const std::function<bool()>& done,
                  const std::function<bool()>& is_alone) override;
  void wake_helper() override;
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
  // The reader of the rings.
  enum class Role { kNobody, kReceiver, kHelper };
  struct Peer {
    Peer(shm::SharedMemory::Peer ends, lanes::LaneTable* lanes);

    const int global_rank;
    // Written to with `mutex` held while `backlog` is empty, otherwise by the
    // sending thread only.
    shm::RingWriter to;
    std::mutex mutex;
    std::deque<Outgoing> backlog;
    std::vector<uint8_t> scratch;
    uint64_t next_sequence = 0;
    // The members below are used by the thread that has the role.
    shm::RingReader from;
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
  bool take_role(Role role);
  bool receive_next();
  bool receive_some(Peer& peer);
  bool has_arrivals();
  void help(const std::function<bool()>& done,
            const std::function<bool()>& is_alone);
  bool look_for_a_while();

  const shm::SharedMemoryPtr memory_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<int, Peer*> peer_of_;  // by global rank
  // The state in which handlers run.
  const std::shared_ptr<const at::ThreadLocalState> plain_state_;
  std::mutex role_mutex_;
  std::condition_variable helper_left_;
  Role role_ = Role::kNobody;
  size_t next_peer_ = 0;  // of the thread that has the role
  std::atomic<uint32_t> num_helper_calls_{0};
  int fault_subscription_ = -1;
  std::atomic<bool> stopping_{false};
  std::thread receiver_;
  std::thread sender_;
};

}  // namespace smp::mailbox
