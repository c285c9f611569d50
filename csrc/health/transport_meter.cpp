#include "csrc/health/transport_meter.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <charconv>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "csrc/health/socket.h"

namespace smp::health {
namespace {

// Fewest bytes between two looks that count as a transfer. Fewer are regular
// messages, such as those of the liveness channel, which may be in step with
// the looks.
constexpr uint64_t kTransferBytes = 16 << 10;

bool is_tcp(int fd) {
  int protocol = 0;
  int domain = 0;
  socklen_t size = sizeof(int);
  return ::getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 &&
         protocol == IPPROTO_TCP &&
         ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 &&
         (domain == AF_INET || domain == AF_INET6);
}

// Returns the address of the other end, in IPv4 form also inside of IPv6.
std::string peer_of(int fd) {
  sockaddr_in6 v6{};
  socklen_t size = sizeof(v6);
  char text[INET6_ADDRSTRLEN] = {};
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&v6), &size) != 0) {
    return {};
  }
  if (v6.sin6_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&v6);
    ::inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
  } else if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    ::inet_ntop(AF_INET, &v6.sin6_addr.s6_addr[12], text, sizeof(text));
  } else {
    ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
  }
  return text;
}

// Returns the counts of a connection, or nothing where the system has none.
std::optional<Sent> sent_by(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  constexpr size_t kNeeded =
      offsetof(tcp_info, tcpi_notsent_bytes) + sizeof(info.tcpi_notsent_bytes);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
      size < kNeeded) {
    return std::nullopt;
  }
  Sent sent{info.tcpi_bytes_acked,
            info.tcpi_unacked > 0 || info.tcpi_notsent_bytes > 0};
  // Counts only repeats by the clock: losses that other packets report are
  // routine.
  sent.is_lost = info.tcpi_unacked > 0 && info.tcpi_retransmits > 0;
  if (sent.is_lost) {
    sent.peer = peer_of(fd);
    sent.lost_since = std::chrono::steady_clock::now();
  }
  return sent;
}

// Returns the inode of the socket that a link below /proc/self/fd shows, or
// nothing for other files. Does not use the descriptor itself, because a thread
// may be closing it.
std::optional<uint64_t> socket_inode(const std::filesystem::path& link) {
  constexpr std::string_view kPrefix = "socket:[";
  std::error_code error;
  const std::string target = std::filesystem::read_symlink(link, error);
  uint64_t inode = 0;
  if (error || !target.starts_with(kPrefix)) return std::nullopt;
  const char* digits = target.data() + kPrefix.size();
  const auto read =
      std::from_chars(digits, target.data() + target.size(), inode);
  if (read.ec != std::errc()) return std::nullopt;
  return inode;
}

}  // namespace

int64_t TransportMeter::read() {
  std::map<uint64_t, Sent> now;
  num_lost_ = 0;
  unreachable_.reset();
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string name = entry.path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    const auto inode = socket_inode(entry.path());
    if (fd < 0 || !inode || !is_tcp(fd)) continue;
    auto found = sent_by(fd);
    if (!found) continue;
    const auto before = seen_.find(*inode);
    if (before != seen_.end() && before->second.has_queue && found->has_queue &&
        found->acknowledged >= before->second.acknowledged + kTransferBytes) {
      num_bytes_ += static_cast<int64_t>(found->acknowledged -
                                         before->second.acknowledged);
    }
    if (found->is_lost) {
      ++num_lost_;
      if (before != seen_.end() && before->second.is_lost &&
          before->second.acknowledged == found->acknowledged) {
        found->lost_since = before->second.lost_since;
      }
      if (std::chrono::steady_clock::now() - found->lost_since >=
          kUnreachableAfter) {
        unreachable_ = found->peer;
      }
    }
    now.emplace(*inode, std::move(*found));
  }
  seen_ = std::move(now);
  return num_bytes_;
}

}  // namespace smp::health
