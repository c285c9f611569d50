#include "csrc/health/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "csrc/common/check.h"

namespace smp::health {
namespace {

using Clock = std::chrono::steady_clock;
using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

constexpr int kBacklog = 1024;
constexpr std::chrono::milliseconds kIdleEvery{200};

std::string last_error() { return std::strerror(errno); }

void set_option(int fd, int level, int name, int value) {
  // A missing option costs speed or delay, never correctness.
  (void)::setsockopt(fd, level, name, &value, sizeof(value));
}

// Sets the options of a connection. A host that vanishes without closing is
// noticed after `kUnreachableAfter`: by unacknowledged bytes, or by the probes
// of an idle connection. Without the first option the system would send again
// for a quarter of an hour.
void tune(int fd) {
  constexpr int kSeconds = static_cast<int>(kUnreachableAfter.count());
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, kSeconds / 4);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, kSeconds / 4);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kSeconds * 1000);
}

bool says_unreachable(int error) {
  switch (error) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
      return true;
    default:
      return false;
  }
}

// Returns the result for a connection that has failed with `errno`.
IoResult failure() {
  return says_unreachable(errno) ? IoResult::kUnreachable : IoResult::kClosed;
}

OwnedFd new_socket(int family) {
  return OwnedFd(
      ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// Listens on a free port of the address. Returns the port, or -1 and leaves
// errno.
int listen_at(const OwnedFd& fd, const sockaddr* address, socklen_t length) {
  sockaddr_storage bound{};
  socklen_t bound_length = sizeof(bound);
  auto* const place = reinterpret_cast<sockaddr*>(&bound);
  if (::bind(fd.get(), address, length) != 0 ||
      ::listen(fd.get(), kBacklog) != 0 ||
      ::getsockname(fd.get(), place, &bound_length) != 0) {
    return -1;
  }
  return ntohs(bound.ss_family == AF_INET6
                   ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                   : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

Listener listen_everywhere() {
  if (OwnedFd fd = new_socket(AF_INET6)) {  // else a host without IPv6
    set_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_addr = in6addr_any;
    const int port =
        listen_at(fd, reinterpret_cast<sockaddr*>(&any), sizeof(any));
    if (port > 0) return {std::move(fd), port};
  }
  OwnedFd fd = new_socket(AF_INET);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  const int port =
      fd ? listen_at(fd, reinterpret_cast<sockaddr*>(&any), sizeof(any)) : -1;
  SMP_CHECK(port > 0,
            "cannot listen on a TCP port of this host: ", last_error());
  return {std::move(fd), port};
}

bool poll_one(int fd, short events, std::chrono::milliseconds timeout) {
  pollfd entry{fd, events, 0};
  return ::poll(&entry, 1, static_cast<int>(timeout.count())) > 0;
}

// Connects to one address. An empty result leaves the reason in `error`.
OwnedFd connect_address(const addrinfo& address, Clock::time_point deadline,
                        const std::function<void()>& idle, std::string& error) {
  OwnedFd fd = new_socket(address.ai_family);
  if (!fd) {
    error = last_error();
    return {};
  }
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0 &&
      errno != EINPROGRESS) {
    error = last_error();
    return {};
  }
  while (!poll_one(fd.get(), POLLOUT, kIdleEvery)) {
    idle();
    if (Clock::now() >= deadline) {
      error = "no answer";
      return {};
    }
  }
  int status = 0;
  socklen_t length = sizeof(status);
  ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &status, &length);
  if (status != 0) {
    error = std::strerror(status);
    return {};
  }
  tune(fd.get());
  return fd;
}

}  // namespace

Listener listen_tcp(const std::string& address) {
  if (address.empty()) return listen_everywhere();
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(address.c_str(), "0", &hints, &found);
  SMP_CHECK(status == 0, "'", address,
            "' is no numeric address: ", ::gai_strerror(status));
  const AddressList addresses(found, &::freeaddrinfo);
  OwnedFd fd = new_socket(found->ai_family);
  const int port = fd ? listen_at(fd, found->ai_addr, found->ai_addrlen) : -1;
  SMP_CHECK(port > 0, "cannot listen on a TCP port of ", address,
            ", by which the other ranks are to reach this one: ", last_error(),
            "; GLOO_SOCKET_IFNAME names another interface");
  return {std::move(fd), port};
}

OwnedFd accept_tcp(const OwnedFd& listener) {
  OwnedFd fd(::accept4(listener.get(), nullptr, nullptr,
                       SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd) tune(fd.get());
  return fd;
}

std::string peer_text(const OwnedFd& fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  std::array<char, NI_MAXHOST> host;
  std::array<char, NI_MAXSERV> port;
  auto* const address = reinterpret_cast<sockaddr*>(&peer);
  if (::getpeername(fd.get(), address, &length) != 0 ||
      ::getnameinfo(address, length, host.data(), host.size(), port.data(),
                    port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  return std::string(host.data()) + ":" + port.data();
}

OwnedFd connect_tcp(const std::string& host, int port,
                    std::chrono::milliseconds timeout,
                    const std::function<void()>& idle) {
  const Clock::time_point deadline = Clock::now() + timeout;
  std::string error;
  while (true) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(),
                                     &hints, &found);
    const AddressList addresses(status == 0 ? found : nullptr, &::freeaddrinfo);
    if (status != 0) error = ::gai_strerror(status);
    for (const addrinfo* one = addresses.get(); one != nullptr;
         one = one->ai_next) {
      OwnedFd fd = connect_address(*one, deadline, idle, error);
      if (fd) return fd;
    }
    SMP_CHECK(Clock::now() < deadline, "cannot connect to ", host, ":", port,
              " within ", static_cast<double>(timeout.count()) / 1e3,
              " s: ", error,
              "; check that rank 0 is alive and that no firewall is between "
              "the hosts");
    poll_one(-1, 0, kIdleEvery);
    idle();
  }
}

std::string unreachable_text() {
  return "it has acknowledged nothing for " +
         std::to_string(kUnreachableAfter.count()) +
         " s (host down, cable or switch, firewall, or route)";
}

std::string connection_error(int error) {
  return says_unreachable(error) ? unreachable_text() : std::strerror(error);
}

OwnedFd begin_connect_tcp(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(
      address.c_str(), std::to_string(port).c_str(), &hints, &found);
  SMP_CHECK(status == 0, "'", address,
            "' is no numeric address: ", ::gai_strerror(status));
  const AddressList addresses(found, &::freeaddrinfo);
  OwnedFd fd = new_socket(found->ai_family);
  SMP_CHECK(fd, "cannot make a socket to ", address, ":", port, ": ",
            last_error());
  tune(fd.get());
  SMP_CHECK(::connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0 ||
                errno == EINPROGRESS,
            "cannot connect to ", address, ":", port, ": ", last_error());
  return fd;
}

std::string connect_error(const OwnedFd& fd) {
  int status = 0;
  socklen_t length = sizeof(status);
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &status, &length) != 0) {
    status = errno;
  }
  return status == 0 ? "" : std::strerror(status);
}

IoResult read_available(const OwnedFd& fd, std::string& buffer, size_t most) {
  std::array<char, 16384> chunk;
  while (buffer.size() < most) {
    const size_t room = std::min(chunk.size(), most - buffer.size());
    const ssize_t size = ::recv(fd.get(), chunk.data(), room, 0);
    if (size > 0) {
      buffer.append(chunk.data(), static_cast<size_t>(size));
    } else if (size < 0 && errno == EINTR) {
      continue;
    } else if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return IoResult::kOk;
    } else {
      return size == 0 ? IoResult::kClosed : failure();
    }
  }
  return IoResult::kOk;
}

IoResult write_available(const OwnedFd& fd, std::string& buffer) {
  size_t done = 0;
  IoResult result = IoResult::kOk;
  while (done < buffer.size()) {
    const ssize_t size = ::send(fd.get(), buffer.data() + done,
                                buffer.size() - done, MSG_NOSIGNAL);
    if (size >= 0) {
      done += static_cast<size_t>(size);
    } else if (errno != EINTR) {
      if (errno != EAGAIN && errno != EWOULDBLOCK) result = failure();
      break;
    }
  }
  buffer.erase(0, done);
  return result;
}

WakeFd::WakeFd() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  SMP_CHECK(fd_, "cannot make an eventfd: ", last_error());
}

void WakeFd::wake() const {
  const uint64_t one = 1;
  (void)!::write(fd_.get(), &one, sizeof(one));
}

void WakeFd::clear() const {
  uint64_t count = 0;
  (void)!::read(fd_.get(), &count, sizeof(count));
}

}  // namespace smp::health
