#include "csrc/health/socket_events.h"

#include <array>
#include <cerrno>
#include <cstring>

#include "csrc/common/check.h"

namespace smp::health {
namespace {

constexpr int kKindShift = 56;

uint64_t event_data(SocketEvents::Kind kind, uint64_t number) {
  return static_cast<uint64_t>(kind) << kKindShift | number;
}

}  // namespace

SocketEvents::SocketEvents() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  SMP_CHECK(epoll_, "cannot make an epoll descriptor: ", std::strerror(errno));
}

void SocketEvents::control(int what, int fd, uint32_t events,
                           uint64_t data) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  SMP_CHECK(::epoll_ctl(epoll_.get(), what, fd, &event) == 0,
            "cannot watch a connection: ", std::strerror(errno));
}

void SocketEvents::add(int fd, uint32_t events, Kind kind,
                       uint64_t number) const {
  control(EPOLL_CTL_ADD, fd, events, event_data(kind, number));
}

void SocketEvents::change(int fd, uint32_t events, Kind kind,
                          uint64_t number) const {
  control(EPOLL_CTL_MOD, fd, events, event_data(kind, number));
}

void SocketEvents::remove(int fd) const { control(EPOLL_CTL_DEL, fd, 0, 0); }

bool SocketEvents::wait(int timeout_ms, const Serve& serve) const {
  std::array<epoll_event, kMaxEvents> events;
  const int count =
      ::epoll_wait(epoll_.get(), events.data(), kMaxEvents, timeout_ms);
  for (int i = 0; i < count; ++i) {
    const uint64_t data = events[i].data.u64;
    serve(static_cast<Kind>(data >> kKindShift),
          data & ((uint64_t{1} << kKindShift) - 1), events[i].events);
  }
  return count == kMaxEvents;
}

}  // namespace smp::health
