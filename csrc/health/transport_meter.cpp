#include "csrc/health/transport_meter.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <charconv>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
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

// What the other end has acknowledged; nothing where the system does not tell.
std::optional<uint64_t> acknowledged_bytes(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  constexpr size_t kNeeded =
      offsetof(tcp_info, tcpi_bytes_acked) + sizeof(info.tcpi_bytes_acked);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
      size < kNeeded) {
    return std::nullopt;
  }
  return info.tcpi_bytes_acked;
}

}  // namespace

int64_t TransportMeter::look() {
  std::map<uint64_t, Seen> now;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string name = entry.path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    struct stat status{};
    if (fd < 0 || ::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode) ||
        !is_tcp(fd)) {
      continue;
    }
    const auto acknowledged = acknowledged_bytes(fd);
    int queued = 0;
    if (!acknowledged || ::ioctl(fd, SIOCOUTQ, &queued) != 0) continue;
    const Seen found{*acknowledged, queued > 0};
    const auto before = seen_.find(status.st_ino);
    if (before != seen_.end() && before->second.has_queue && found.has_queue &&
        found.acknowledged >= before->second.acknowledged + kTransferBytes) {
      num_bytes_ += static_cast<int64_t>(found.acknowledged -
                                         before->second.acknowledged);
    }
    now.emplace(status.st_ino, found);
  }
  seen_ = std::move(now);
  return num_bytes_;
}

}  // namespace smp::health
