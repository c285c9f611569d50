#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/mailbox/link.h"
#include "csrc/mailbox/wire.h"

namespace smp::mailbox {

/// Sends messages over a communicator, whose tags 1 and 2 belong to the link.
///
/// `post` passes a message to the transport; one thread keeps its tensors until
/// the transport is done with them. One thread per peer receives, and the next
/// receive of every peer is always posted. A small message thus crosses Gloo in
/// one hop instead of the three of a receive from any rank. A long message of
/// one peer does not delay others, and a broken connection names its peer. It
/// becomes a fault (kDied of the peer) after a time in which the liveness
/// channel may report the reason.
class CommunicatorLink final : public Link {
 public:
  CommunicatorLink(comm::CommunicatorPtr world, const std::vector<int>& peers,
                   LinkOwner owner);

  void post(int dst, Message message) override;
  void begin_close() override;
  void stop() override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Outgoing {
    std::vector<comm::WorkPtr> works;  // keep their tensors
    Clock::time_point posted;
  };
  struct Peer {
    std::mutex mutex;  // one message at a time, so that its parts stay together
    uint64_t next_sequence = 0;
    std::deque<Outgoing> sends;  // guarded by the link's mutex
  };

  void issue(int dst, const wire::Encoded& encoded, Outgoing& outgoing);
  void collect_sends();
  bool collect_from(std::unique_lock<std::mutex>& lock, int dst, Peer& peer);

  void receive_from(int peer);
  void receive_messages(int peer);
  Message read_message(int peer, const at::Tensor& packet, uint64_t sequence);
  comm::WorkPtr begin_receive(const at::Tensor& to, int peer, int tag);
  void end_receive(const comm::WorkPtr& work);
  void report_lost(int peer, const std::string& text);

  const comm::CommunicatorPtr world_;
  std::map<int, Peer> peers_;  // by global rank; never changes

  std::mutex mutex_;
  std::condition_variable changed_;
  bool draining_ = false;
  bool stopping_ = false;
  int64_t num_uncollected_ = 0;  // messages in `sends`
  bool collector_sleeps_ = false;
  std::set<comm::WorkPtr> receives_;  // to be aborted by `stop`
  std::vector<std::thread> threads_;
};

}  // namespace smp::mailbox
