#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace smp::health {

/// What a TCP connection has sent: bytes that the other end has acknowledged,
/// and whether others wait.
struct Sent {
  uint64_t acknowledged = 0;
  bool has_queue = false;
  /// The system sends some of it again, since no acknowledgement has come.
  bool is_lost = false;
  std::string peer = {};  ///< address, without port; of one that has lost some
  std::chrono::steady_clock::time_point lost_since = {};
};

/// How many bytes the TCP connections of this process have got through to
/// their other ends, as the system counts them: Gloo, MPI and NCCL have sockets
/// of their own, and none of them tells how far it is. A connection counts
/// if bytes wait in it at two looks in a row, as they do on a slow link, and
/// some packets got through in between: the odd message of somebody's logging
/// is no transfer, nor is what ranks say regularly.
class TransportMeter {
 public:
  /// Looks, and returns what was counted so far. One thread.
  int64_t look();

  /// Connections that have lost something at the last look.
  int64_t num_lost() const { return num_lost_; }

  /// The address of a host that has acknowledged nothing for
  /// `kUnreachableAfter` although the system keeps sending.
  const std::optional<std::string>& unreachable() const { return unreachable_; }

 private:
  std::map<uint64_t, Sent> seen_;  // by inode: descriptors are used again
  int64_t num_bytes_ = 0;
  int64_t num_lost_ = 0;
  std::optional<std::string> unreachable_;
};

}  // namespace smp::health
