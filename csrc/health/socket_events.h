#pragma once

#include <sys/epoll.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "csrc/health/fork_guard.h"

namespace smp::health {

/// Descriptors that one thread waits for; others may add and change some.
class SocketEvents {
 public:
  /// What a descriptor is; with a number of its own it says which.
  enum class Kind : uint64_t { kWake, kListener, kIncoming, kOutgoing };
  using Serve =
      std::function<void(Kind kind, uint64_t number, uint32_t events)>;

  /// So many events at most come in one `wait`.
  static constexpr int kMaxEvents = 64;

  SocketEvents();

  /// @param events  of epoll; 0: none, but the descriptor stays
  /// @throws Error when the system cannot
  void add(int fd, uint32_t events, Kind kind, uint64_t number) const;
  void change(int fd, uint32_t events, Kind kind, uint64_t number) const;

  /// Before the descriptor is closed: a copy of it in a child that has just
  /// been forked would keep it here.
  void remove(int fd) const;

  /// @param timeout_ms  -1: until something happens
  /// @return whether there may be more to serve at once
  bool wait(int timeout_ms, const Serve& serve) const;

 private:
  void control(int what, int fd, uint32_t events, uint64_t data) const;

  const OwnedFd epoll_;
};

}  // namespace smp::health
