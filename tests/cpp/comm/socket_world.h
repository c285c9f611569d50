#pragma once

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "csrc/comm/peer_sockets.h"
#include "csrc/comm/socket_communicator.h"

namespace smp::comm {

inline constexpr const char* kSecret = "a secret that only these tests know";

/// The sockets of `size` ranks that are threads of this process.
inline std::vector<std::shared_ptr<PeerSockets>> make_socket_world(int size) {
  std::vector<std::shared_ptr<PeerSockets>> world;
  std::vector<std::string> addresses;
  for (int rank = 0; rank < size; ++rank) {
    world.push_back(std::make_shared<PeerSockets>(
        rank, PeerSockets::Options{.secret = kSecret}));
    addresses.push_back(world.back()->address());
  }
  for (const auto& sockets : world) sockets->set_addresses(addresses);
  return world;
}

inline std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace smp::comm
