#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "csrc/health/fork_guard.h"

namespace smp::health {

// Non-blocking TCP sockets for short messages.

struct Listener {
  OwnedFd fd;
  int port = 0;
};

/// Listens on a free port, of 127.0.0.1 only or of all interfaces.
Listener listen_tcp(bool loopback_only);

/// The next connection that waits at a listener; empty when there is none.
OwnedFd accept_tcp(const OwnedFd& listener);

/// @param idle  called a few times per second while waiting; may throw
/// @throws Error naming the address when it cannot be reached in time
OwnedFd connect_tcp(const std::string& host, int port,
                    std::chrono::milliseconds timeout,
                    const std::function<void()>& idle);

enum class IoResult { kOk, kClosed };

/// Appends what has arrived to `buffer`; kClosed at the end or on an error.
IoResult read_available(const OwnedFd& fd, std::string& buffer);

/// Sends what the system takes and removes it from `buffer`.
IoResult write_available(const OwnedFd& fd, std::string& buffer);

/// Ends a poll() in another thread.
class WakeFd {
 public:
  WakeFd();
  int get() const { return fd_.get(); }
  void wake() const;
  void clear() const;

 private:
  OwnedFd fd_;
};

}  // namespace smp::health
