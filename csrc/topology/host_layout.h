#pragma once

#include <string>
#include <vector>

namespace smp::topology {

/// How the ranks of a group lie on hosts, as one of them sees it.
struct HostLayout {
  /// Why collectives of the group cannot go by hosts, in words; empty: they
  /// can. The same on all ranks of the group, unlike what follows.
  std::string obstacle;
  /// Group ranks with the place of this one on their hosts, in the order of
  /// hosts; hosts are in the order of their first group ranks.
  std::vector<int> across;
  /// Group ranks of the own host.
  std::vector<int> within;
  /// Group ranks are those of the first host, then those of the second one, and
  /// so on, so that what is in their order is in the order of hosts.
  bool is_host_by_host = false;

  bool goes_by_hosts() const { return obstacle.empty(); }
};

/// A collective goes by hosts where there are at least two of them and each has
/// the same number of ranks of the group, at least two. Pure.
/// @param hosts  names, by group rank
/// @throws ValueError when there is no such group rank
HostLayout lay_out_by_hosts(const std::vector<std::string>& hosts,
                            int group_rank);

}  // namespace smp::topology
