#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace smp::health {

/// Counts of a TCP connection: bytes that the other end has acknowledged, and
/// whether more wait.
struct Sent {
  uint64_t acknowledged = 0;
  bool has_queue = false;
  /// The system sends some bytes again, since no acknowledgement has come.
  bool is_lost = false;
  std::string peer = {};  ///< address without port, if something was lost
  std::chrono::steady_clock::time_point lost_since = {};
};

/// Counts the bytes that TCP connections of this process have delivered to
/// their other ends, as the system counts them. Gloo, MPI and NCCL have sockets
/// of their own, and none of them reports its progress. A connection counts if
/// bytes wait in it at two reads in a row, as on a slow link, and some packets
/// got through in between. A message of some logger is thus no transfer, nor
/// are the regular messages of ranks.
class TransportMeter {
 public:
  /// Reads the counters and returns the bytes counted so far. Used by one
  /// thread.
  int64_t read();

  /// Returns the number of connections with losses at the last read.
  int64_t num_lost() const { return num_lost_; }

  /// Returns the address of a host that has acknowledged nothing for
  /// `kUnreachableAfter` although the system keeps sending.
  const std::optional<std::string>& unreachable() const { return unreachable_; }

 private:
  std::map<uint64_t, Sent> seen_;  // by inode: descriptors are used again
  int64_t num_bytes_ = 0;
  int64_t num_lost_ = 0;
  std::optional<std::string> unreachable_;
};

}  // namespace smp::health
