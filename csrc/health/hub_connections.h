#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/health/doorkeeper.h"
#include "csrc/health/handshake.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/socket.h"
#include "csrc/health/socket_events.h"

namespace smp::health {

/// Part of the hub: the connections of all ranks, and those of strangers until
/// they have proven who they are. What comes over one connection takes the same
/// time however many others there are. Of one thread but for `wake` and `port`.
class HubConnections {
 public:
  using Clock = std::chrono::steady_clock;

  /// What the connections are for. A call that throws Error ends the connection
  /// whose frame it was given.
  struct Owner {
    /// Why a process that has proven to be this rank may not be it; empty: it
    /// is welcome, and is this rank from now on.
    std::function<std::string(int global_rank)> refusal;
    /// It has been welcomed, and may be told more.
    std::function<void(int global_rank, const LivenessFrame& hello)> come;
    std::function<void(int global_rank, LivenessFrame frame)> take;
    /// Its connection has ended; after all that had come has been taken.
    std::function<void(int global_rank, bool is_unreachable)> lost;
  };

  /// @param address  where to listen: numeric, of this host; empty: everywhere
  /// @param limits   of strangers, beside the ranks, which may come all at once
  HubConnections(int world_size, const std::string& address, std::string secret,
                 DoorLimits limits, Owner owner);

  int port() const { return listener_.port; }
  /// Ends `serve` in another thread.
  void wake() const { wake_.wake(); }

  /// Waits until something has come, no longer than a time, and takes all that
  /// has; sends nothing.
  void serve(std::chrono::milliseconds timeout);
  /// A few times per second: sends strangers away who are late.
  void tick();

  /// Queues bytes of frames for a rank; nothing if it is not connected.
  void send(int global_rank, const std::string& bytes);
  /// For all ranks but one.
  void send_to_all(const std::string& bytes, int except = -1);
  /// For all that are not quiet (kQuietAfter): few bytes of no importance.
  void send_to_listening(const std::string& bytes);
  /// Sends what the system takes of it; the rest goes in later calls.
  void flush();
  bool has_unsent() const { return !queued_.empty() || num_waiting_ > 0; }

  void close();

 private:
  struct Connection {
    Connection(OwnedFd fd, Handshake handshake)
        : fd(std::move(fd)), handshake(std::move(handshake)) {}

    OwnedFd fd;
    Handshake handshake;
    std::string in;
    std::string out;
    const Clock::time_point accepted = Clock::now();
    Clock::time_point heard_at = accepted;
    Clock::time_point alive_sent_at;
    int global_rank = -1;  // -1 until a right hello
    bool is_closed = false;
    bool is_unreachable = false;  // that is why it closed
    bool is_queued = false;       // for the next flush
    bool waits_for_room = false;  // until its socket takes more
  };

  void serve(SocketEvents::Kind kind, uint64_t id, uint32_t what);
  void watch_door();
  void accept_all();
  void receive(uint64_t id, Connection& connection);
  void read(uint64_t id, Connection& connection);
  void take_hello(uint64_t id, Connection& connection,
                  const LivenessFrame& hello);
  void queue(uint64_t id, Connection& connection, const std::string& bytes);
  void write(uint64_t id, Connection& connection);
  void note_closed(uint64_t id, Connection& connection);
  void close_late();
  void drop_closed();

  const std::string secret_;
  const Owner owner_;
  const Listener listener_;
  const WakeFd wake_;
  const SocketEvents events_;
  Doorkeeper door_;
  bool is_door_watched_ = true;
  uint64_t next_id_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<int64_t> of_rank_;  // ids, -1: not connected
  std::set<uint64_t> half_open_;  // in the order in which they came
  std::vector<uint64_t> queued_;
  size_t num_waiting_ = 0;
  std::vector<uint64_t> closed_;  // and not yet dropped
};

}  // namespace smp::health
