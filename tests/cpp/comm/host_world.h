#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/comm/hierarchical_communicator.h"
#include "tests/cpp/comm/local_world.h"

namespace smp::comm {

/// Makes the communicators of so many ranks, in their order.
using MakeWorld = std::function<std::vector<CommunicatorPtr>(int, std::string)>;

/// Groups of ranks on pretended hosts.
struct HostWorld {
  int num_hosts;
  int per_host;
  /// Rank r is on host r % num_hosts, else r / per_host.
  bool is_dealt = false;
  MakeWorld make_within = make_local_world;
  MakeWorld make_across = make_local_world;

  int size() const { return num_hosts * per_host; }
  int host_of(int rank) const {
    return is_dealt ? rank % num_hosts : rank / per_host;
  }
  int place_of(int rank) const {
    return is_dealt ? rank / num_hosts : rank % per_host;
  }

  /// Makes the groups of all ranks.
  std::vector<HostGroups> make_groups() const {
    const auto flat = make_local_world(size());
    std::vector<HostGroups> groups(static_cast<size_t>(size()));
    std::vector<std::vector<CommunicatorPtr>> scatter;
    std::vector<std::vector<CommunicatorPtr>> gather;
    std::vector<std::vector<CommunicatorPtr>> across;
    for (int host = 0; host < num_hosts; ++host) {
      scatter.push_back(make_within(per_host, "scatter"));
      gather.push_back(make_within(per_host, "gather"));
    }
    for (int place = 0; place < per_host; ++place) {
      across.push_back(make_across(num_hosts, "across"));
    }
    for (int rank = 0; rank < size(); ++rank) {
      const int host = host_of(rank);
      const int place = place_of(rank);
      groups[rank] = {flat[rank], scatter[host][place], across[place][host],
                      gather[host][place], !is_dealt};
    }
    return groups;
  }
};

}  // namespace smp::comm
