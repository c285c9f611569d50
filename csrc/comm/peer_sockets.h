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

/// Sends frames of bytes from this process to other ranks and back, over TCP.
///
/// A connection is opened for the first frame to a rank. It begins with a proof
/// of both sides that they are of one job, serves one direction, and is shared
/// by all streams. A process thus has as many sockets as it has partners,
/// however many ranks and groups there are. One thread connects, receives, and
/// finishes what `post` could not send at once. Frames of one rank to another
/// one arrive in the order of `post`.
///
/// Received frames are never held back, so that no stream waits for another
/// one. A rank that posts much has to wait for the other side now and then.
class PeerSockets {
 public:
  struct Options {
    /// Numeric address of this host at which this process listens and is
    /// reached.
    std::string address = health::kLoopback;
    /// Secret of the job. A process that does not prove that it has the secret
    /// can neither send nor receive frames (health::Handshake).
    std::string secret;
    /// Limits of connections that have proven nothing yet.
    health::DoorLimits door = {};
  };

  struct Frame {
    int source_rank = -1;  ///< global rank
    uint64_t tag = 0;
    uint64_t note = 0;  ///< number for the receiver to compare
    size_t size = 0;
  };

  /// Takes the frames of a stream, called by the receiving thread. Calls must
  /// be short. An exception ends the connection of the source.
  class Receiver {
   public:
    virtual ~Receiver() = default;
    /// Returns memory for the bytes of a frame, valid until `end`. May be null
    /// if the frame is empty.
    virtual uint8_t* begin(const Frame& frame) = 0;
    virtual void end(const Frame& frame) = 0;
    /// Called when nothing more comes from this rank; any thread, perhaps
    /// twice.
    virtual void lost(int global_rank, const std::string& why) = 0;
  };

  /// Bytes to send; their owner is kept until they are sent.
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
  /// Called with an empty text when the system has all bytes, else with the
  /// reason why they will not be sent.
  using Sent = std::function<void(const std::string& error)>;

  PeerSockets(int global_rank, Options options);
  ~PeerSockets();  // calls close()
  PeerSockets(const PeerSockets&) = delete;
  PeerSockets& operator=(const PeerSockets&) = delete;

  int global_rank() const;

  /// Returns the address of this process for the `set_addresses` of others.
  std::string address() const;

  /// @param addresses  addresses of all ranks; frames can be sent from then on
  void set_addresses(std::vector<std::string> addresses);

  /// Adds a receiver. Frames that have come already are delivered in this call.
  /// @param stream  number equal on all ranks that use it; used once
  void add_receiver(uint64_t stream, std::shared_ptr<Receiver> receiver);
  /// Drops all later frames of the stream. A call in progress may end later.
  void remove_receiver(uint64_t stream);

  /// Sends frames in one piece. Never waits.
  /// @param sent  called once, here or by the receiving thread; may be empty.
  ///              Gets an error at once when the rank is lost, or after `close`
  void post(int dst_global_rank, uint64_t stream, std::vector<Outgoing> frames,
            Sent sent);

  /// Returns the number of connections this process has opened or accepted.
  int64_t num_connections() const;

  /// Ends all connections, and unsent frames with an error. May be called
  /// twice.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Returns the number of the stream with this name.
uint64_t stream_of(const std::string& name);

/// Returns the numeric address by which other hosts reach this one.
/// @param interface  name of an interface; empty: that of the way to `towards`
/// @param towards    host that all ranks reach, name or number
/// @throws Error if there is none
std::string own_address(const std::string& interface,
                        const std::string& towards);

}  // namespace smp::comm
