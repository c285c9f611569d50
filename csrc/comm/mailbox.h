#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "csrc/comm/communicator.h"
#include "csrc/comm/fault_board.h"
#include "csrc/comm/message.h"

namespace smp::comm {

/// Sends and receives Messages over the world communicator. Messages from one
/// rank to another arrive in the order of `post`, over all channels. A message
/// to oneself is delivered too.
///
/// A message goes to the transport inside `post`; one thread keeps its tensors
/// until the transport is done with them. One thread per peer receives and
/// hands each message to the handler of its channel: with the next receive of
/// every peer always in place, a small message crosses Gloo in one hop instead
/// of the three that receiving from anybody takes, a long message of one peer
/// holds up nobody else, and a broken connection names its peer.
///
/// A failure of the transport is reported to the FaultBoard (kDied of the
/// peer), after a moment in which the liveness channel may tell the reason; it
/// is never thrown.
class Mailbox {
 public:
  using Handler = std::function<void(Message&&)>;

  struct Stats {
    int64_t messages_sent = 0;
    int64_t bytes_sent = 0;  ///< on the wire: headers, structure and tensors
    int64_t messages_received = 0;
    int64_t bytes_received = 0;
  };

  /// @param world  CPU communicator over all ranks; group rank = global rank.
  ///               Nothing else may use its messages with tags 1 and 2.
  Mailbox(CommunicatorPtr world, std::shared_ptr<FaultBoard> faults);
  ~Mailbox();  // calls close()

  int global_rank() const;
  int world_size() const;

  /// Queues a message; never blocks on the network. Tensors are CPU or device
  /// tensors of any strides and must not be written to until received:
  /// callers that go on writing pass a copy. Tensors arrive detached, on the
  /// CPU (those to oneself stay where they are).
  /// @throws ValueError for tensors that are not dense; Error after `close`
  void post(int dst_global_rank, Message message);

  /// Sets the handler of a channel, called by one receiving thread at a time.
  /// Messages that came before are delivered inside this call. An empty
  /// handler makes the channel keep messages until the next handler. When this
  /// returns, the previous handler is not running. Not to be called from a
  /// handler.
  void set_handler(Channel channel, Handler handler);

  Stats stats() const;
  /// Messages that the transport has not taken over yet.
  int64_t num_unsent() const;
  /// Grows with each message sent or received: no growth means no progress.
  int64_t progress() const;

  /// Waits until posted messages are out (bounded by `timeout`), then joins
  /// all threads. May be called twice; not from a handler.
  void close(std::chrono::milliseconds timeout = std::chrono::seconds(5));

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace smp::comm
