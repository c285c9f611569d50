#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/comm/peer_sockets.h"

namespace smp::comm {

/// Who gets what comes on which stream of PeerSockets. What comes before
/// somebody asks for it is kept. Thread-safe.
class SocketStreams {
 public:
  using Receiver = PeerSockets::Receiver;

  std::shared_ptr<Receiver> receiver_of(uint64_t stream);

  /// What has come already is delivered inside this call.
  void add(uint64_t stream, std::shared_ptr<Receiver> receiver);
  /// What comes from now on is thrown away.
  void remove(uint64_t stream);
  /// Nobody gets anything any more.
  void clear();

  /// Tells all receivers, and those that come later, that nothing more comes
  /// from a rank; once for each rank.
  void lose(int global_rank, const std::string& why);

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Receiver>> receivers_;
  std::map<int, std::string> lost_;
};

}  // namespace smp::comm
