#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/health/doorkeeper.h"
#include "csrc/health/socket.h"

namespace smp::comm {

/// Frames of bytes from this process to other ranks and back, over TCP.
///
/// A connection is opened when the first frame goes to a rank, begins with a
/// proof of both sides that they are of one job, and serves one direction; all
/// streams share it. So a process has as many sockets as it has
/// ranks that it really talks with, however many ranks and groups there are.
/// One thread connects, receives, and finishes what `post` could not send at
/// once. Frames of one rank to another one arrive in the order of `post`.
///
/// What is received is never held back, so that no stream waits for another
/// one; who posts much has to wait for the other side now and then.
class PeerSockets {
 public:
  struct Options {
    /// Of this host, numeric: this process listens there, and is reached there.
    std::string address = health::kLoopback;
    /// Of the job. Who does not prove that he knows it sends no frame to
    /// anybody, and gets none (health::Handshake).
    std::string secret;
    /// Of connections that have proven nothing yet.
    health::DoorLimits door = {};
  };

  struct Frame {
    int source_rank = -1;  ///< global rank
    uint64_t tag = 0;
    uint64_t note = 0;  ///< whatever the sender wants to be compared
    size_t size = 0;
  };

  /// Gets what comes on a stream, called by the receiving thread. Calls must be
  /// short. An exception ends the connection of the source.
  class Receiver {
   public:
    virtual ~Receiver() = default;
    /// Memory for the bytes of a frame, valid until `end`. May be null if there
    /// are none.
    virtual uint8_t* begin(const Frame& frame) = 0;
    virtual void end(const Frame& frame) = 0;
    /// Nothing more comes from this rank; any thread, and perhaps twice.
    virtual void lost(int global_rank, const std::string& why) = 0;
  };

  /// Bytes to send; whoever owns them keeps them until they are sent.
  struct Piece {
    std::shared_ptr<const void> owner;
    const uint8_t* data = nullptr;
    size_t size = 0;
  };
  struct Outgoing {
    uint64_t tag = 0;
    uint64_t note = 0;
    std::vector<Piece> pieces;
  };
  /// Empty text: all bytes are with the system. Else why they never will be.
  using Sent = std::function<void(const std::string& error)>;

  PeerSockets(int global_rank, Options options);
  ~PeerSockets();  // calls close()
  PeerSockets(const PeerSockets&) = delete;
  PeerSockets& operator=(const PeerSockets&) = delete;

  int global_rank() const;

  /// Where others reach this process, for their `set_addresses`.
  std::string address() const;

  /// @param addresses  of all ranks. Before, frames may come but not go.
  void set_addresses(std::vector<std::string> addresses);

  /// What has come on the stream already is delivered inside this call.
  /// @param stream  equal on all ranks that use it; used once
  void add_receiver(uint64_t stream, std::shared_ptr<Receiver> receiver);
  /// What comes on the stream from now on is thrown away. A call in progress
  /// may end later.
  void remove_receiver(uint64_t stream);

  /// Sends frames in one piece. Never waits.
  /// @param sent  called once, here or by the receiving thread; may be empty.
  ///              With an error at once when the rank is lost, or after `close`
  void post(int dst_global_rank, uint64_t stream, std::vector<Outgoing> frames,
            Sent sent);

  /// Connections that this process has opened or accepted.
  int64_t num_connections() const;

  /// Ends all connections, unsent frames with an error. May be called twice.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The number of a stream from its name.
uint64_t stream_of(const std::string& name);

/// The address by which other hosts reach this one, numeric.
/// @param interface  its name; empty: that of the way to `towards`
/// @param towards    a host that all ranks reach, name or number
/// @throws Error if there is none
std::string own_address(const std::string& interface,
                        const std::string& towards);

}  // namespace smp::comm
