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

/// Part of the hub: the connections of all ranks, and of processes that have
/// not proven their identity yet. Taking a frame costs the same however many
/// connections there are. Used by one thread except for `wake` and `port`.
class HubConnections {
 public:
  using Clock = std::chrono::steady_clock;

  /// Callbacks of the hub. A call that throws Error ends the connection whose
  /// frame it was given.
  struct Owner {
    /// Returns why a process that has proven to be this rank is refused. Empty:
    /// it is welcome, and is this rank from now on.
    std::function<std::string(int global_rank)> refusal;
    /// Called when the rank has been welcomed; frames may be sent to it.
    std::function<void(int global_rank, const LivenessFrame& hello)> come;
    std::function<void(int global_rank, LivenessFrame frame)> take;
    /// Called when the connection of a rank has ended and all its frames have
    /// been taken.
    std::function<void(int global_rank, bool is_unreachable)> lost;
  };

  /// @param address  numeric address of this host to listen at; empty: all
  /// @param limits   limits of half-open connections beside those of the ranks,
  ///                 which may come all at once
  HubConnections(int world_size, const std::string& address, std::string secret,
                 DoorLimits limits, Owner owner);

  int port() const { return listener_.port; }
  /// Ends `serve` in another thread.
  void wake() const { wake_.wake(); }

  /// Waits up to a time until something has come, and takes all that has. Sends
  /// nothing.
  void serve(std::chrono::milliseconds timeout);
  /// Closes half-open connections that are late; called a few times per second.
  void tick();

  /// Queues bytes of frames for a rank; does nothing if it is not connected.
  void send(int global_rank, const std::string& bytes);
  /// Queues bytes of frames for all ranks but one.
  void send_to_all(const std::string& bytes, int except = -1);
  /// Queues a few unimportant bytes for all ranks that are not quiet
  /// (kQuietAfter).
  void send_to_listening(const std::string& bytes);
  /// Sends as many queued bytes as the system takes; later calls send the rest.
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
