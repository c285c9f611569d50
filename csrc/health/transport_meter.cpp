#include "csrc/health/transport_meter.h"

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

namespace smp::health {
namespace {

// Less between two looks is talk, such as that of the liveness channel, which
// may be in step with the looks.
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

// What a connection has sent; nothing where the system does not tell.
std::optional<Sent> sent_by(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  constexpr size_t kNeeded =
      offsetof(tcp_info, tcpi_notsent_bytes) + sizeof(info.tcpi_notsent_bytes);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
      size < kNeeded) {
    return std::nullopt;
  }
  return Sent{info.tcpi_bytes_acked,
              info.tcpi_unacked > 0 || info.tcpi_notsent_bytes > 0};
}

// The inode of the socket that a link below /proc/self/fd shows; nothing for
// other files. The descriptor itself is not asked: it may belong to a thread
// that is closing it.
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

int64_t TransportMeter::look() {
  std::map<uint64_t, Sent> now;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string name = entry.path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    const auto inode = socket_inode(entry.path());
    if (fd < 0 || !inode || !is_tcp(fd)) continue;
    const auto found = sent_by(fd);
    if (!found) continue;
    const auto before = seen_.find(*inode);
    if (before != seen_.end() && before->second.has_queue && found->has_queue &&
        found->acknowledged >= before->second.acknowledged + kTransferBytes) {
      num_bytes_ += static_cast<int64_t>(found->acknowledged -
                                         before->second.acknowledged);
    }
    now.emplace(*inode, *found);
  }
  seen_ = std::move(now);
  return num_bytes_;
}

}  // namespace smp::health
