#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "csrc/comm/communicator.h"
#include "csrc/comm/peer_sockets.h"
#include "csrc/health/fault_board.h"
#include "csrc/lanes/copy_log.h"
#include "csrc/lanes/lane_table.h"
#include "csrc/mailbox/link.h"
#include "csrc/mailbox/message.h"
#include "csrc/shm/shared_memory.h"

namespace smp::mailbox {

/// Sends and receives Messages between ranks: those of one host through shared
/// memory, others over connections that the first message opens, or, without
/// such connections (MPI), over the world communicator. Messages from one rank
/// to another arrive in the order of `post`, over all channels. A message to
/// oneself is delivered too.
///
/// A failure of the transport is reported to the FaultBoard; it is never
/// thrown. That a rank of this host has died must be told by the liveness
/// channel.
class Mailbox {
 public:
  using Handler = std::function<void(Message&&)>;

  /// Bytes are headers, structure and tensors; a message to oneself has none.
  struct Stats : Traffic {
    Traffic shared_memory;  ///< the part of it that went through shared memory
    lanes::LaneCounters lanes;  ///< tensors of `bytes_*` or beside them
  };

  /// @param world  CPU communicator over all ranks; group rank = global rank.
  ///               Nothing else may use its messages with tags 1 and 2 if there
  ///               are no `sockets`.
  /// @param shared_memory  made with `world`; may serve one mailbox
  /// @param lanes  of the same kind on all ranks; their device is that of this
  ///               rank: the current one of all threads of the mailbox. Where
  ///               ranks have to agree on them this is collective over `world`
  /// @param sockets  on all ranks or on none; may serve one mailbox
  Mailbox(comm::CommunicatorPtr world,
          std::shared_ptr<health::FaultBoard> faults,
          const shm::SharedMemoryPtr& shared_memory = nullptr,
          lanes::LaneOptions lanes = {},
          std::shared_ptr<comm::PeerSockets> sockets = nullptr);
  ~Mailbox();  // calls close()

  int global_rank() const;
  int world_size() const;

  /// Queues a message; never waits for the receiver. Tensors are CPU or device
  /// tensors of any strides; they are copied before `post` returns, or in the
  /// order of the current stream, so that the caller may write to them, except
  /// where MessageTensor says `is_stable`.
  /// Tensors arrive detached, on the CPU; those to oneself stay where they are,
  /// and what went over a lane is on this rank's device, with a mark.
  /// @throws ValueError for tensors that are not dense; Error after `close`
  void post(int dst_global_rank, Message message);

  /// Sets the handler of a channel, called by one receiving thread at a time.
  /// A handler must be short: one thread receives from all ranks of this host.
  /// A message that waits for its lane (HeldArrivals) is delivered by another
  /// thread.
  /// Messages that came before are delivered inside this call. An empty
  /// handler makes the channel keep messages until the next handler. When this
  /// returns, the previous handler is not running. Not to be called from a
  /// handler.
  void set_handler(Channel channel, Handler handler);

  /// A thread that waits for something that a message brings receives messages
  /// itself meanwhile, so that no other thread has to wake it.
  /// @param done  whether the wait is over; asked again after each message and
  ///     each `wake_helper`. Handlers run in this thread, in the plain
  ///     thread-local state; the caller holds no lock that they need.
  /// @param is_alone  whether nothing else of this rank computes, so that a
  ///     moment of looking for a message, which sleeping would delay, is free
  /// @return false at once when another thread receives just now or when no
  ///     rank shares memory with this one: wait in another way. Else true, when
  ///     done or when the mailbox closes.
  bool help_until(const std::function<bool()>& done,
                  const std::function<bool()>& is_alone);
  /// Something other than a message has ended a helper's wait. Any thread.
  void wake_helper();

  Stats stats() const;
  /// Which way tensors of devices take, by source and destination; empty where
  /// they travel in messages.
  lanes::LaneChoices lanes() const;
  /// Records what travels over lanes; null where there are none.
  std::shared_ptr<lanes::CopyLog> lane_copies() const;
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

}  // namespace smp::mailbox
