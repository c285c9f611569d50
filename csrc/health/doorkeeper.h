#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "csrc/health/fork_guard.h"

namespace smp::health {

/// Limits on connections of unknown processes.
struct DoorLimits {
  /// Most half-open connections, that is, connections that have proven nothing
  /// yet. Further connections wait in the system.
  size_t max_half_open = 64;
  /// Longest time a connection may stay half-open.
  std::chrono::milliseconds half_open_time{10000};
  /// Longest time while other connections have to wait.
  std::chrono::milliseconds half_open_time_when_full{1000};
};

/// Accepts connections for a listener and counts the half-open ones. Logs the
/// connections that are refused, at most one line in ten seconds. Used by one
/// thread.
class Doorkeeper {
 public:
  /// @param place  name of the listener for messages: "the liveness hub"
  Doorkeeper(std::string place, DoorLimits limits);

  /// Returns whether connections are accepted now: there is room, and the
  /// system has descriptors.
  bool is_open() const;
  /// Tries again to get descriptors from the system; called a few times per
  /// second.
  void retry_accept() { is_paused_ = false; }

  /// Returns the next waiting connection, which is half-open from now on.
  /// Returns an empty descriptor when none waits or there is no room.
  OwnedFd accept(const OwnedFd& listener);
  /// Notes that a half-open connection has proven its identity or has ended.
  void on_no_longer_half_open() { --num_half_open_; }
  size_t num_half_open() const { return num_half_open_; }
  /// Returns whether a connection accepted then has been half-open for too
  /// long.
  bool is_late(std::chrono::steady_clock::time_point accepted) const;

  /// Logs why a connection is being closed.
  void log_refusal(const OwnedFd& stranger, const std::string& why);

 private:
  void log(const std::string& text);

  const std::string place_;
  const DoorLimits limits_;
  size_t num_half_open_ = 0;
  bool is_paused_ = false;
  std::chrono::steady_clock::time_point logged_at_;
  int64_t num_unlogged_ = 0;
};

/// The reason for closing a connection that stays half-open.
inline constexpr const char* kTooLate =
    "it has not proven in time that it knows the secret of this job";

}  // namespace smp::health
