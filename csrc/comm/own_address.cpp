#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <memory>

#include "csrc/comm/peer_sockets.h"
#include "csrc/common/check.h"
#include "csrc/health/fork_guard.h"

namespace smp::comm {
namespace {

std::string numeric(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const socklen_t size = address->sa_family == AF_INET6 ? sizeof(sockaddr_in6)
                                                        : sizeof(sockaddr_in);
  if (::getnameinfo(address, size, text.data(), text.size(), nullptr, 0,
                    NI_NUMERICHOST) != 0) {
    return "";
  }
  return text.data();
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" ||
         address.starts_with("::ffff:127.");
}

// Returns the address of an interface, or of the first without loopback; IPv4
// first. Skips link-local addresses, which other hosts cannot use.
std::string of_interface(const std::string& interface) {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(found,
                                                               &::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) {
      if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != family ||
          (one->ifa_flags & IFF_UP) == 0) {
        continue;
      }
      const bool is_wanted = interface.empty()
                                 ? (one->ifa_flags & IFF_LOOPBACK) == 0
                                 : interface == one->ifa_name;
      const std::string address = numeric(one->ifa_addr);
      if (is_wanted && !address.empty() && !address.starts_with("fe80")) {
        return address;
      }
    }
  }
  return "";
}

// Returns the address from which the system would reach the host; sends
// nothing.
std::string on_the_way_to(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(
      found, &::freeaddrinfo);
  for (const addrinfo* one = all.get(); one != nullptr; one = one->ai_next) {
    const health::OwnedFd fd(
        ::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t size = sizeof(own);
    auto* const address = reinterpret_cast<sockaddr*>(&own);
    if (fd && ::connect(fd.get(), one->ai_addr, one->ai_addrlen) == 0 &&
        ::getsockname(fd.get(), address, &size) == 0) {
      return numeric(address);
    }
  }
  return "";
}

}  // namespace

std::string own_address(const std::string& interface,
                        const std::string& towards) {
  if (!interface.empty()) {
    const std::string address = of_interface(interface);
    SMP_CHECK(!address.empty(), "this host has no network interface '",
              interface,
              "' that is up and has an address; correct GLOO_SOCKET_IFNAME");
    return address;
  }
  // The way from a host to itself may start at its loopback.
  const std::string address = on_the_way_to(towards);
  if (!address.empty() && !is_loopback(address)) return address;
  const std::string first = of_interface("");
  if (!first.empty()) return first;
  SMP_CHECK(!address.empty(), "no network interface of this host leads to '",
            towards, "'; set GLOO_SOCKET_IFNAME to the name of one");
  return address;
}

}  // namespace smp::comm
