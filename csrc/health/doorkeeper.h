#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "csrc/health/fork_guard.h"

namespace smp::health {

/// What strangers may cost.
struct DoorLimits {
  /// So many connections may be half-open, that is have proven nothing yet;
  /// others wait in the system.
  size_t max_half_open = 64;
  /// So long each of them may stay.
  std::chrono::milliseconds patience{10000};
  /// And so long when others have to wait.
  std::chrono::milliseconds patience_when_full{1000};
};

/// Accepts connections for somebody who listens, counts those that have proven
/// nothing yet, and tells the log of those that are sent away, a line at most
/// in ten seconds. Of one thread.
class Doorkeeper {
 public:
  /// @param place  what is listened for, in words: "the liveness hub"
  Doorkeeper(std::string place, DoorLimits limits);

  /// Whether to look for connections at all: there is room, and the system has
  /// descriptors.
  bool is_open() const;
  /// What the system did not give may be there now; a few times per second.
  void look_again() { is_paused_ = false; }

  /// The next connection that waits, which is half-open from now on; empty when
  /// there is none, or no room.
  OwnedFd accept(const OwnedFd& listener);
  /// It has proven who it is, or has ended.
  void on_no_longer_half_open() { --num_half_open_; }
  size_t num_half_open() const { return num_half_open_; }
  /// Whether it has been half-open for too long.
  bool is_late(std::chrono::steady_clock::time_point accepted) const;

  /// Says why a connection is being closed.
  void tell_of(const OwnedFd& stranger, const std::string& why);

 private:
  void tell(const std::string& text);

  const std::string place_;
  const DoorLimits limits_;
  size_t num_half_open_ = 0;
  bool is_paused_ = false;
  std::chrono::steady_clock::time_point told_at_;
  int64_t num_untold_ = 0;
};

/// Why a connection that stays half-open is closed.
inline constexpr const char* kTooLate =
    "it has not proven in time that it knows the secret of this job";

}  // namespace smp::health
