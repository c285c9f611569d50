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

/// Sends and receives Messages between ranks. Ranks of one host use shared
/// memory. Others use connections that the first message opens, or, without
/// such connections (MPI), the world communicator. Messages from one rank to
/// another arrive in the order of `post`, over all channels. A message of a
/// rank to itself is delivered too.
///
/// A failure of the transport is reported to the FaultBoard; it is never
/// thrown. The liveness channel must report that a rank of this host has died.
class Mailbox {
 public:
  using Handler = std::function<void(Message&&)>;

  /// Traffic of the links; a message of a rank to itself has no bytes.
  struct Stats : Traffic {
    Traffic shared_memory;  ///< the part of it that went through shared memory
    lanes::LaneCounters lanes;  ///< tensors of `bytes_*` or beside them
  };

  /// @param world  CPU communicator over all ranks; group rank = global rank.
  ///               Without `sockets` nothing else may use its messages with
  ///               tags 1 and 2.
  /// @param shared_memory  made with `world`; may serve one mailbox
  /// @param lanes  equal kinds on all ranks. Their device is the current one of
  ///               all threads of the mailbox. If ranks have to agree on the
  ///               lanes, this is collective over `world`
  /// @param sockets  given on all ranks or on none; may serve one mailbox
  Mailbox(comm::CommunicatorPtr world,
          std::shared_ptr<health::FaultBoard> faults,
          const shm::SharedMemoryPtr& shared_memory = nullptr,
          lanes::LaneOptions lanes = {},
          std::shared_ptr<comm::PeerSockets> sockets = nullptr);
  ~Mailbox();  // calls close()

  int global_rank() const;
  int world_size() const;

  /// Queues a message; never waits for the receiver. Tensors are CPU or device
  /// tensors of any strides. They are copied before `post` returns, or in the
  /// order of the current stream, so that the caller may write to them, except
  /// if MessageTensor has `is_stable`. Tensors arrive detached, on the CPU.
  /// Tensors of a rank to itself stay where they are, and tensors of a lane
  /// arrive on this rank's device, with a mark.
  /// @throws ValueError for tensors that are not dense; Error after `close`
  void post(int dst_global_rank, Message message);

  /// Sets the handler of a channel, called by one receiving thread at a time. A
  /// handler must be short: one thread receives from all ranks of this host.
  /// Another thread delivers a message that waits for its lane (HeldArrivals).
  /// Earlier messages are delivered inside this call. An empty handler makes
  /// the channel keep messages until the next handler. When this returns, the
  /// previous handler is not running. Not to be called from a handler.
  void set_handler(Channel channel, Handler handler);

  /// Lets a thread that waits for the effect of a message receive messages
  /// itself, so that no other thread has to wake it.
  /// @param done  returns whether the wait is over; called again after each
  ///              message and each `wake_helper`. Handlers run in this thread,
  ///              in the plain thread-local state; the caller holds no lock
  ///              that they need.
  /// @param is_alone  returns whether nothing else of this rank computes, so
  ///                that a moment of spinning for a message, faster than sleep,
  ///                  is free
  /// @return false at once when another thread receives just now or when no
  ///         rank shares memory with this one: wait in another way. Otherwise
  ///         true, when done or when the mailbox closes.
  bool help_until(const std::function<bool()>& done,
                  const std::function<bool()>& is_alone);
  /// Wakes the helper, whose wait has ended without a message; any thread.
  void wake_helper();

  Stats stats() const;
  /// Returns the lanes of device tensors by source and destination; empty if
  /// they travel in messages.
  lanes::LaneChoices lanes() const;
  /// Returns the recorder of the lanes' copies; null without lanes.
  std::shared_ptr<lanes::CopyLog> lane_copies() const;
  /// Returns how many messages the transport has not taken over yet.
  int64_t num_unsent() const;
  /// Returns a count that grows with each message sent or received.
  int64_t progress() const;

  /// Waits until posted messages are sent (bounded by `timeout`), then joins
  /// all threads. May be called twice; not from a handler.
  void close(std::chrono::milliseconds timeout = std::chrono::seconds(5));

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace smp::mailbox
