#pragma once

#include <sys/epoll.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "csrc/health/fork_guard.h"

namespace smp::health {

/// The descriptors that one thread waits for; others may add and change some.
class SocketEvents {
 public:
  /// The kind of a descriptor; together with a number it identifies one.
  enum class Kind : uint64_t { kWake, kListener, kIncoming, kOutgoing };
  using Serve =
      std::function<void(Kind kind, uint64_t number, uint32_t events)>;

  /// Most events that one `wait` returns.
  static constexpr int kMaxEvents = 64;

  SocketEvents();

  /// @param events  epoll events; 0: none, but the descriptor stays
  /// @throws Error when the system call fails
  void add(int fd, uint32_t events, Kind kind, uint64_t number) const;
  void change(int fd, uint32_t events, Kind kind, uint64_t number) const;

  /// Removes a descriptor before it is closed: otherwise a copy in a child that
  /// has just been forked would keep it registered.
  void remove(int fd) const;

  /// @param timeout_ms  -1: until something happens
  /// @return whether more events may be waiting
  bool wait(int timeout_ms, const Serve& serve) const;

 private:
  void control(int what, int fd, uint32_t events, uint64_t data) const;

  const OwnedFd epoll_;
};

}  // namespace smp::health
