#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "csrc/health/fork_guard.h"

namespace smp::health {

// Non-blocking TCP sockets for short messages.

struct Listener {
  OwnedFd fd;
  int port = 0;
};

/// The address that only processes of this host (of its network namespace) can
/// reach.
inline constexpr const char* kLoopback = "127.0.0.1";

/// Listens on a free port.
/// @param address  numeric address of this host; empty: all of its addresses
/// @throws Error naming the address when that is not possible
Listener listen_tcp(const std::string& address);

/// Returns the next connection that waits at a listener. Empty when there is
/// none, or on an error: see errno.
OwnedFd accept_tcp(const OwnedFd& listener);

/// Returns the address of the other end, as "10.0.0.2:4711", or "an unknown
/// address" when the system has none any more.
std::string peer_text(const OwnedFd& fd);

/// Connects to a host.
/// @param idle  called a few times per second while waiting; may throw
/// @throws Error naming the address when it cannot be reached in time
OwnedFd connect_tcp(const std::string& host, int port,
                    std::chrono::milliseconds timeout,
                    const std::function<void()>& idle);

/// Time without acknowledgements after which the host of the other end counts
/// as unreachable. The host of a stopped process does not: its system answers.
inline constexpr std::chrono::seconds kUnreachableAfter{15};

/// Begins to connect to a numeric address and does not wait. A poll for writing
/// ends when the result is there; see `connect_error`.
/// @throws Error naming the address when it cannot even begin
OwnedFd begin_connect_tcp(const std::string& address, int port);

/// Returns why the connection failed; empty when it is open.
std::string connect_error(const OwnedFd& fd);

/// A rank silent for longer than `kQuietAfter` may be stopped, and is sent
/// something at `kQuietEvery` only. Otherwise its buffer would fill within
/// minutes, and bytes that wait in our buffer would look like an unreachable
/// host.
inline constexpr std::chrono::seconds kQuietAfter{5};
inline constexpr std::chrono::seconds kQuietEvery{30};

enum class IoResult {
  kOk,
  kClosed,       ///< the other end closed it, or it broke
  kUnreachable,  ///< the host of the other end does not answer any more
};

/// Appends the bytes that have arrived to `buffer`. Returns kClosed or
/// kUnreachable at the end or on an error.
/// @param most  size of `buffer` at which to stop; more bytes may have arrived
IoResult read_available(const OwnedFd& fd, std::string& buffer,
                        size_t most = SIZE_MAX);

/// Returns the words for `kUnreachable`, for people.
std::string unreachable_text();

/// Returns why a connection has failed, for people: `unreachable_text` if
/// `error` means that the host of the other end does not answer.
std::string connection_error(int error);

/// Sends as many bytes as the system takes and removes them from `buffer`.
IoResult write_available(const OwnedFd& fd, std::string& buffer);

/// A descriptor that ends a poll() in another thread.
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
