#pragma once

#include <string>
#include <vector>

namespace smp::topology {

/// The places of a group's ranks on hosts, as one rank sees them.
struct HostLayout {
  /// Reason why collectives of the group cannot go by hosts, as text; empty:
  /// they can. The same on all ranks of the group, unlike the members below.
  std::string obstacle;
  /// Group ranks with the place of this rank on their hosts, in the order of
  /// hosts; hosts are in the order of their first group ranks.
  std::vector<int> across;
  /// Group ranks on the host of this rank.
  std::vector<int> within;
  /// True if group ranks are those of the first host, then those of the second
  /// one, and so on, so that data in their order are in the order of hosts.
  bool is_host_by_host = false;

  bool goes_by_hosts() const { return obstacle.empty(); }
};

/// Lays out a group. A collective goes by hosts where there are at least two
/// hosts and each has the same number of ranks of the group, at least two.
/// Pure.
/// @param hosts  names, by group rank
/// @throws ValueError when there is no such group rank
HostLayout lay_out_by_hosts(const std::vector<std::string>& hosts,
                            int group_rank);

}  // namespace smp::topology
