#include "csrc/topology/host_layout.h"

#include <algorithm>
#include <cstddef>

#include "csrc/common/check.h"

namespace smp::topology {
namespace {

struct Host {
  std::string name;
  std::vector<int> group_ranks;
};

std::vector<Host> hosts_of(const std::vector<std::string>& names) {
  std::vector<Host> hosts;
  for (size_t i = 0; i < names.size(); ++i) {
    auto host = std::find_if(hosts.begin(), hosts.end(), [&](const Host& one) {
      return one.name == names[i];
    });
    if (host == hosts.end()) {
      host =
          hosts.insert(hosts.end(), Host{.name = names[i], .group_ranks = {}});
    }
    host->group_ranks.push_back(static_cast<int>(i));
  }
  return hosts;
}

std::string obstacle_of(const std::vector<Host>& hosts) {
  const size_t per_host = hosts.front().group_ranks.size();
  if (hosts.size() == 1) {
    return detail::concat("all of its ", per_host, " ranks are on host ",
                          hosts.front().name);
  }
  for (const Host& host : hosts) {
    if (host.group_ranks.size() == per_host) continue;
    return detail::concat("host ", hosts.front().name, " has ", per_host,
                          " of its ranks and host ", host.name, " has ",
                          host.group_ranks.size());
  }
  if (per_host > 1) return "";
  return detail::concat("each of its ", hosts.size(), " hosts has one rank");
}

}  // namespace

HostLayout lay_out_by_hosts(const std::vector<std::string>& names,
                            int group_rank) {
  SMP_CHECK_VALUE(
      group_rank >= 0 && group_rank < static_cast<int>(names.size()),
      "lay_out_by_hosts: expected a group rank in [0, ", names.size(),
      "), got ", group_rank);
  const std::vector<Host> hosts = hosts_of(names);
  HostLayout layout;
  layout.obstacle = obstacle_of(hosts);
  if (!layout.goes_by_hosts()) return layout;
  const std::vector<int>* own = nullptr;
  std::vector<int> in_order;
  for (const Host& host : hosts) {
    if (host.name == names[group_rank]) own = &host.group_ranks;
    in_order.insert(in_order.end(), host.group_ranks.begin(),
                    host.group_ranks.end());
  }
  const auto place =
      std::find(own->begin(), own->end(), group_rank) - own->begin();
  for (const Host& host : hosts) {
    layout.across.push_back(host.group_ranks[place]);
  }
  layout.within = *own;
  layout.is_host_by_host = std::is_sorted(in_order.begin(), in_order.end());
  return layout;
}

}  // namespace smp::topology
