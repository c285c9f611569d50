#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/comm/peer_sockets.h"
#include "csrc/health/fork_guard.h"
#include "csrc/health/handshake.h"

namespace smp::comm {

// The two ends of a connection of PeerSockets. First comes a handshake, then
// one frame after the other: a head and its bytes. All ranks of a run have the
// same byte order.

/// Returns the purpose of the handshake with a rank that listens.
std::string peer_purpose(int global_rank);

/// Largest frame; a larger size means a corrupt head.
inline constexpr uint64_t kMaxFrameBytes = uint64_t{1} << 40;

struct FrameHead {
  uint32_t magic;
  uint32_t reserved;
  uint64_t stream;
  uint64_t tag;
  uint64_t note;
  uint64_t size;
};

/// Sends frames; not thread-safe.
class OutgoingSocket {
 public:
  using Done = std::vector<std::pair<PeerSockets::Sent, std::string>>;

  bool is_new() const { return !fd_; }
  /// Returns whether frames may be sent: both sides have proven that they have
  /// the secret.
  bool is_open() const { return is_open_; }
  bool has_unsent() const { return !queue_.empty(); }
  /// Returns whether to go on when the system takes bytes.
  bool wants_to_write() const {
    return is_open_ ? has_unsent() : !handshake_out_.empty();
  }
  const health::OwnedFd& fd() const { return fd_; }

  /// @param fd  connection that is being made
  void begin(health::OwnedFd fd, health::Handshake handshake);
  /// Continues the handshake, once the connection is there.
  /// @return why the connection is broken; empty if it is not
  std::string prove();

  void queue(uint64_t stream, std::vector<PeerSockets::Outgoing> frames,
             PeerSockets::Sent sent);
  /// Sends what the system takes.
  /// @param done  receives the callbacks to call, without any lock
  /// @return why the connection is broken; empty if it is not
  std::string send(Done& done);
  /// Checks for the end: the other side never sends, so readable means ended.
  /// @return why the connection is broken; empty if it is not
  std::string look_for_end() const;
  /// Gives up the unsent frames.
  void fail(const std::string& why, Done& done);

 private:
  struct Batch {
    std::deque<PeerSockets::Piece> pieces;
    PeerSockets::Sent sent;
  };

  health::OwnedFd fd_;
  std::optional<health::Handshake> handshake_;
  std::string handshake_in_;
  std::string handshake_out_;
  bool is_open_ = false;
  std::deque<Batch> queue_;
};

/// Receives frames; used by one thread.
class IncomingSocket {
 public:
  using FindReceiver =
      std::function<std::shared_ptr<PeerSockets::Receiver>(uint64_t stream)>;

  /// @param handshake  handshake of a listener
  IncomingSocket(health::OwnedFd fd, health::Handshake handshake,
                 FindReceiver find);

  const health::Handshake& handshake() const { return handshake_; }
  bool is_proven() const { return handshake_.is_proven(); }
  const health::OwnedFd& fd() const { return fd_; }

  /// Reads for a while, and returns whether the connection goes on.
  /// @param why    receives the reason if it does not
  /// @param admit  called when the handshake has advanced, before it is
  ///               answered and before any later bytes are read; may throw
  bool read(std::string& why, const std::function<void()>& admit);

 private:
  bool read_some(std::string& why, bool& is_empty);
  void consume(const std::function<void()>& admit);
  bool shake_hands(const std::function<void()>& admit);
  void begin_frame();
  void end_frame();

  const health::OwnedFd fd_;
  health::Handshake handshake_;
  const FindReceiver find_;
  std::vector<uint8_t> staged_;  // read, and not looked at from `staged_begin_`
  size_t staged_begin_ = 0;
  size_t staged_end_ = 0;
  bool in_frame_ = false;
  PeerSockets::Frame frame_;
  std::shared_ptr<PeerSockets::Receiver> receiver_;
  uint8_t* to_ = nullptr;
  size_t filled_ = 0;
};

}  // namespace smp::comm
