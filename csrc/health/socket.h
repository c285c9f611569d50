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

/// Only processes of this host (of its network namespace) get there.
inline constexpr const char* kLoopback = "127.0.0.1";

/// Listens on a free port.
/// @param address  numeric, of this host; empty: all of its addresses
/// @throws Error naming the address when that is not possible
Listener listen_tcp(const std::string& address);

/// The next connection that waits at a listener; empty when there is none, or
/// that failed: see errno.
OwnedFd accept_tcp(const OwnedFd& listener);

/// Where the other end is, as "10.0.0.2:4711"; "an unknown address" once that
/// cannot be told any more.
std::string peer_text(const OwnedFd& fd);

/// @param idle  called a few times per second while waiting; may throw
/// @throws Error naming the address when it cannot be reached in time
OwnedFd connect_tcp(const std::string& host, int port,
                    std::chrono::milliseconds timeout,
                    const std::function<void()>& idle);

/// The host of the other end counts as unreachable when it has acknowledged
/// nothing for so long. A stopped process is none: its system answers.
inline constexpr std::chrono::seconds kUnreachableAfter{15};

/// Begins to connect to a numeric address and does not wait; a poll for writing
/// ends when it is known how that went, see `connect_error`.
/// @throws Error naming the address when it cannot even begin
OwnedFd begin_connect_tcp(const std::string& address, int port);

/// Why the connection did not come about; empty when it did.
std::string connect_error(const OwnedFd& fd);

/// Who has said nothing for longer than `kQuietAfter` may be stopped, and hears
/// something at `kQuietEvery` only: else its buffer fills in the course of
/// minutes, and what waits in ours then looks like an unreachable host.
inline constexpr std::chrono::seconds kQuietAfter{5};
inline constexpr std::chrono::seconds kQuietEvery{30};

enum class IoResult {
  kOk,
  kClosed,       ///< the other end closed it, or it broke
  kUnreachable,  ///< the host of the other end does not answer any more
};

/// Appends what has arrived to `buffer`; kClosed or kUnreachable at the end or
/// on an error.
/// @param most  stops when there are so many bytes in it; more may have arrived
IoResult read_available(const OwnedFd& fd, std::string& buffer,
                        size_t most = SIZE_MAX);

/// How `kUnreachable` was seen, for people.
std::string unreachable_text();

/// Why a connection has failed, for people: `unreachable_text` where `error`
/// says that the host of the other end does not answer.
std::string connection_error(int error);

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
