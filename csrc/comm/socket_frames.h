#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/comm/peer_sockets.h"
#include "csrc/health/fork_guard.h"

namespace smp::comm {

// The two ends of a connection of PeerSockets. First comes a hello, then one
// frame after the other: a head and its bytes. Ranks of a run have one byte
// order.

inline constexpr size_t kTokenBytes = 32;

struct SocketHello {
  uint32_t magic;
  int32_t global_rank;                  ///< who connects
  std::array<char, kTokenBytes> token;  ///< of who listens
};

struct FrameHead {
  uint32_t magic;
  uint32_t reserved;
  uint64_t stream;
  uint64_t tag;
  uint64_t note;
  uint64_t size;
};

/// Sends; not thread-safe.
class OutgoingSocket {
 public:
  using Done = std::vector<std::pair<PeerSockets::Sent, std::string>>;

  bool is_new() const { return !fd_; }
  bool is_open() const { return is_open_; }
  bool has_unsent() const { return !queue_.empty(); }
  const health::OwnedFd& fd() const { return fd_; }

  /// @param fd  a connection that is being made
  void begin(health::OwnedFd fd, const SocketHello& hello);
  /// The connection is there.
  void open() { is_open_ = true; }

  void queue(uint64_t stream, std::vector<PeerSockets::Outgoing> frames,
             PeerSockets::Sent sent);
  /// Sends what the system takes.
  /// @param done  gets what is to be called, without any lock
  /// @return why the connection is broken; empty if it is not
  std::string send(Done& done);
  /// The other side never sends, so what can be read is the end.
  /// @return why the connection is broken; empty if it is not
  std::string look_for_end() const;
  /// Gives up what is unsent.
  void fail(const std::string& why, Done& done);

 private:
  struct Batch {
    std::deque<PeerSockets::Piece> pieces;
    PeerSockets::Sent sent;
  };

  health::OwnedFd fd_;
  bool is_open_ = false;
  std::deque<Batch> queue_;
};

/// Receives; of one thread.
class IncomingSocket {
 public:
  using FindReceiver =
      std::function<std::shared_ptr<PeerSockets::Receiver>(uint64_t stream)>;

  /// @param token  that the other side must know
  IncomingSocket(health::OwnedFd fd, const std::string& token,
                 FindReceiver find);

  /// -1 until the hello was right.
  int source_rank() const { return source_rank_; }
  const health::OwnedFd& fd() const { return fd_; }

  /// Reads for a while, and returns whether the connection goes on.
  /// @param why  gets the reason if it does not
  bool read(std::string& why);

 private:
  bool read_some(std::string& why, bool& is_empty);
  void consume();
  void take_hello();
  void begin_frame();
  void end_frame();

  const health::OwnedFd fd_;
  const std::string token_;
  const FindReceiver find_;
  int source_rank_ = -1;
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
