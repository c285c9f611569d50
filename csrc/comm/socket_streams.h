#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/comm/peer_sockets.h"

namespace smp::comm {

/// The receivers of the streams of PeerSockets. Frames that come before their
/// receiver are kept. Thread-safe.
class SocketStreams {
 public:
  using Receiver = PeerSockets::Receiver;

  std::shared_ptr<Receiver> receiver_of(uint64_t stream);

  /// Adds a receiver. Frames that have come already are delivered in this call.
  void add(uint64_t stream, std::shared_ptr<Receiver> receiver);
  /// Drops all later frames of the stream.
  void remove(uint64_t stream);
  /// Removes all receivers.
  void clear();

  /// Calls all receivers, and later ones, because nothing more comes from a
  /// rank; once for each rank.
  void lose(int global_rank, const std::string& why);

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Receiver>> receivers_;
  std::map<int, std::string> lost_;
};

}  // namespace smp::comm
