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

/// The connections that others have opened to this process: of strangers, until
/// they have proven that they know the secret of the job, and of ranks, at most
/// one of each. Of one thread but for what says otherwise.
class IncomingPeers {
 public:
  struct Owner {
    IncomingSocket::FindReceiver find;
    /// Nothing more comes from this rank.
    std::function<void(int global_rank, const std::string& why)> lost;
  };

  /// @param address  where to listen; numeric, of this host; empty: everywhere
  IncomingPeers(const health::SocketEvents& events, int global_rank,
                const std::string& address, std::string secret,
                health::DoorLimits limits, Owner owner);

  int port() const { return listener_.port; }
  /// Ranks that have connected so far; any thread.
  int64_t num_ranks() const;

  void accept_all();
  void serve(uint64_t id);
  /// How long to wait for events, in ms, before the next `tick`; -1: for ever.
  int tick_ms() const;
  void tick();
  void close() { connections_.clear(); }

  /// The connection to a rank has ended. What that rank has sent before may
  /// still be on its way, and then its own connection says when that is over.
  /// Any thread.
  /// @return whether `Owner::lost` will be called for it
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
  // What is known of a rank that connects, or has connected.
  struct Source {
    int num_claims = 0;  // by connections that are half-open
    bool has_come = false;
    // Told when nobody claims to be the rank any more, or at that time.
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
  const std::chrono::milliseconds patience_;
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
