#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/comm/peer_sockets.h"

namespace smp::comm {

/// Messages of bytes between the ranks of one group; ranks are group ranks. A
/// message that arrives finds the receive posted for its source and tag, or
/// waits for one. Thread-safe.
class SocketExchange final
    : public PeerSockets::Receiver,
      public std::enable_shared_from_this<SocketExchange> {
 public:
  using Owner = std::shared_ptr<const void>;

  /// A send or receive; the exchange guards all members but the constants.
  struct Transfer {
    enum class State { kRunning, kSucceeded, kFailed };

    int peer = -1;  ///< group rank
    uint64_t tag = 0;
    uint64_t note = 0;
    uint8_t* to = nullptr;  ///< receives only
    size_t size = 0;
    Owner owner;

    State state = State::kRunning;
    bool is_matched = false;
    bool is_aborted = false;
    std::string error;
    uint64_t other_note = 0;  ///< of a message that does not fit
    size_t other_size = 0;
    bool does_not_fit = false;
  };
  using TransferPtr = std::shared_ptr<Transfer>;

  /// @param sockets  connections that outlive all calls but those of the
  ///                 receiving thread, which must not be the last to keep them
  SocketExchange(PeerSockets& sockets, const std::string& name,
                 std::vector<int> global_ranks);

  /// Starts to receive; call it once.
  void start();
  /// Fails all transfers in flight and all later ones; may be called twice.
  void abort();
  bool is_aborted() const;

  int group_rank() const { return group_rank_; }
  int size() const { return static_cast<int>(global_ranks_.size()); }

  TransferPtr send(int dst, uint64_t tag, uint64_t note, const void* data,
                   size_t size, Owner owner);
  TransferPtr receive(int src, uint64_t tag, uint64_t note, void* to,
                      size_t size, Owner owner);

  /// @return false at the deadline
  bool wait_until(Transfer& transfer,
                  std::chrono::steady_clock::time_point deadline);
  bool is_over(const Transfer& transfer) const;
  /// Stops a receive from taking messages; a message coming in still comes.
  void abort(const TransferPtr& transfer);

  // PeerSockets::Receiver
  uint8_t* begin(const PeerSockets::Frame& frame) override;
  void end(const PeerSockets::Frame& frame) override;
  void lost(int global_rank, const std::string& why) override;

 private:
  using State = Transfer::State;
  struct Arrival {
    int source = -1;
    uint64_t tag = 0;
    uint64_t note = 0;
    std::vector<uint8_t> bytes;
    bool is_complete = false;
  };

  int group_rank_of(int global_rank) const;
  bool take_arrival(Transfer& receive);
  TransferPtr match(int source, uint64_t tag);
  bool fits(Transfer& receive, uint64_t note, size_t size) const;
  void finish(Transfer& transfer, std::string error = {});

  PeerSockets& sockets_;
  const uint64_t stream_;
  const std::vector<int> global_ranks_;
  const int group_rank_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false;
  std::list<Arrival> arrivals_;      // no receive was there for them
  std::list<TransferPtr> receives_;  // no message was there for them
  std::map<int, std::string> lost_;  // by group rank
  struct Open {
    TransferPtr receive;  // null: an arrival, or not wanted
    Arrival* arrival = nullptr;
    std::vector<uint8_t> unwanted;
  };
  std::map<int, Open> open_;  // the message that is coming in, by group rank
  std::map<const Transfer*, TransferPtr> sends_;  // not yet sent
};

/// Returns words for an error of a group's exchange.
std::string text_of_lost(int group_rank, int global_rank,
                         const std::string& why);

}  // namespace smp::comm
