#include "csrc/health/doorkeeper.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "csrc/common/log.h"
#include "csrc/health/socket.h"

namespace smp::health {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kTellEvery{10};

// Returns whether the system lacks resources. The connection then stays in the
// queue, and a new attempt would fail at once.
bool is_lack(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS ||
         error == ENOMEM;
}

bool is_of_one_connection(int error) {
  return error == ECONNABORTED || error == EINTR || error == EPROTO;
}

}  // namespace

Doorkeeper::Doorkeeper(std::string place, DoorLimits limits)
    : place_(std::move(place)), limits_(limits) {}

bool Doorkeeper::is_open() const {
  return !is_paused_ && num_half_open_ < limits_.max_half_open;
}

OwnedFd Doorkeeper::accept(const OwnedFd& listener) {
  while (is_open()) {
    OwnedFd fd = accept_tcp(listener);
    if (fd) {
      ++num_half_open_;
      return fd;
    }
    if (is_of_one_connection(errno)) continue;
    if (is_lack(errno)) {
      is_paused_ = true;
      log(place_ + " cannot accept a connection now: " + std::strerror(errno) +
          " (ulimit -n); it goes on trying");
    }
    break;
  }
  return {};
}

bool Doorkeeper::is_late(Clock::time_point accepted) const {
  const bool is_full = num_half_open_ >= limits_.max_half_open;
  return Clock::now() - accepted >
         (is_full ? limits_.half_open_time_when_full : limits_.half_open_time);
}

void Doorkeeper::log_refusal(const OwnedFd& stranger, const std::string& why) {
  log("a connection from " + peer_text(stranger) + " to " + place_ +
      " was closed: " + why);
}

void Doorkeeper::log(const std::string& text) {
  const Clock::time_point now = Clock::now();
  if (logged_at_ != Clock::time_point() && now - logged_at_ < kTellEvery) {
    ++num_unlogged_;
    return;
  }
  logged_at_ = now;
  const int64_t others = std::exchange(num_unlogged_, 0);
  log_line(LogLevel::kWarning,
           others == 0
               ? text
               : text + " (and " + std::to_string(others) + " like it before)");
}

}  // namespace smp::health
