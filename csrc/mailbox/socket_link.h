#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "csrc/comm/peer_sockets.h"
#include "csrc/mailbox/link.h"
#include "csrc/mailbox/wire.h"

namespace smp::mailbox {

/// Sends messages over the connections of this process, each of which is opened
/// by the first message to its rank. The receiving thread of the connections
/// assembles the messages, large tensors directly in their final memory, and
/// runs the handlers.
///
/// A broken connection becomes a fault (kDied of the peer) after a time in
/// which the liveness channel may report the reason.
class SocketLink final : public Link {
 public:
  /// @param peers  global ranks that this link reaches
  SocketLink(std::shared_ptr<comm::PeerSockets> sockets,
             const std::vector<int>& peers, LinkOwner owner);

  void post(int dst, Message message) override;
  void stop() override;

 private:
  using Clock = std::chrono::steady_clock;
  class Incoming;
  struct Peer {
    std::mutex mutex;
    uint64_t next_sequence = 0;
  };
  // A broken connection, and the time by which a reason has to come.
  struct Loss {
    int global_rank;
    std::string text;
    Clock::time_point explained_by;
  };

  void report_lost(int peer, const std::string& text);
  void watch_losses();

  const std::shared_ptr<comm::PeerSockets> sockets_;
  std::map<int, Peer> peers_;  // by global rank; never changes
  std::shared_ptr<Incoming> incoming_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::vector<Loss> losses_;
  std::thread watch_;  // begins with the first loss
};

}  // namespace smp::mailbox
