#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/comm/socket_frames.h"
#include "csrc/health/doorkeeper.h"
#include "csrc/health/socket.h"
#include "csrc/health/socket_events.h"

namespace smp::comm {

/// The connections that others have opened to this process: half-open ones, and
/// at most one of each rank that has proven that it has the job's secret. Used
/// by one thread unless noted.
class IncomingPeers {
 public:
  struct Owner {
    IncomingSocket::FindReceiver find;
    /// Called when nothing more comes from this rank.
    std::function<void(int global_rank, const std::string& why)> lost;
  };

  /// @param address  numeric address of this host to listen at; empty: all
  IncomingPeers(const health::SocketEvents& events, int global_rank,
                const std::string& address, std::string secret,
                health::DoorLimits limits, Owner owner);

  int port() const { return listener_.port; }
  /// Returns how many ranks have connected so far; any thread may call it.
  int64_t num_ranks() const;

  void accept_all();
  void serve(uint64_t id);
  /// Returns how long to wait for events, in ms, before `tick`; -1: for ever.
  int tick_ms() const;
  void tick();
  void close() { connections_.clear(); }

  /// Notes that the connection to a rank has ended. Earlier messages of that
  /// rank may still be on their way; its own connection then ends later. Any
  /// thread may call it.
  /// @return whether `Owner::lost` will be called for the rank
  bool will_tell(int global_rank, const std::string& why);

 private:
  struct Connection {
    Connection(health::OwnedFd fd, health::Handshake handshake,
               IncomingSocket::FindReceiver find)
        : socket(std::move(fd), std::move(handshake), std::move(find)) {}

    IncomingSocket socket;
    const std::chrono::steady_clock::time_point since =
        std::chrono::steady_clock::now();
    int claimed = -1;  // the rank that it says it is
    bool is_rank = false;
  };
  // The state of a rank that connects, or has connected.
  struct Source {
    int num_claims = 0;  // by connections that are half-open
    bool has_come = false;
    // Reason of the loss, reported when no connection claims to be the rank any
    // more, or at the time below.
    std::string lost_why;
    std::chrono::steady_clock::time_point lost_at;
  };

  void watch_door();
  void admit(Connection& connection);
  void claim(Connection& connection);
  void withdraw_claim(Connection& connection);
  void end(uint64_t id, const std::string& why);
  void tell_of_overdue();

  const health::SocketEvents& events_;
  const std::string purpose_;
  const std::string secret_;
  const std::chrono::milliseconds half_open_time_;
  const Owner owner_;
  const health::Listener listener_;
  health::Doorkeeper door_;
  bool is_door_watched_ = true;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;
  uint64_t next_id_ = 0;

  mutable std::mutex mutex_;
  std::map<int, Source> sources_;
};

}  // namespace smp::comm
