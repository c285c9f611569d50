#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/fault_board.h"
#include "csrc/comm/message.h"

namespace smp::comm {

/// Sends and receives Messages over the world communicator. One thread
/// receives and hands each message to the handler of its channel; one thread
/// sends. Messages from one rank to another arrive in the order of `post`,
/// over all channels. A message to oneself is delivered too.
///
/// A failure of the transport is reported to the FaultBoard (kDied of the peer
/// when known), never thrown from a thread.
class Mailbox {
 public:
  using Handler = std::function<void(Message&&)>;

  struct Stats {
    int64_t messages_sent = 0;
    int64_t bytes_sent = 0;  ///< headers, structure and tensors
    int64_t messages_received = 0;
    int64_t bytes_received = 0;
  };

  /// @param world  CPU communicator over all ranks; group rank = global rank
  Mailbox(CommunicatorPtr world, std::shared_ptr<FaultBoard> faults);
  ~Mailbox();  // calls close()

  /// Queues a message; never blocks on the network. Tensors are CPU or device
  /// tensors of any strides and must not be written to until received:
  /// callers that go on writing pass a copy.
  void post(int dst_global_rank, Message message);

  /// Sets the handler of a channel, called from the receiving thread. Messages
  /// that came before are delivered inside this call. An empty handler makes
  /// the channel keep messages until the next handler.
  void set_handler(Channel channel, Handler handler);

  Stats stats() const;
  /// Messages queued for sending and not yet handed to the transport.
  int64_t num_unsent() const;
  /// Grows with each message sent or received: no growth means no progress.
  int64_t progress() const;

  /// Waits until queued messages are out (bounded by `timeout`), then joins
  /// both threads. May be called twice.
  void close(std::chrono::milliseconds timeout = std::chrono::seconds(5));

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace smp::comm
