#include "csrc/topology/host_layout.h"

#include <gtest/gtest.h>

#include "csrc/common/check.h"

namespace smp::topology {
namespace {

using Hosts = std::vector<std::string>;
using Ranks = std::vector<int>;

TEST(HostLayout, RanksHostByHost) {
  const Hosts hosts = {"b", "b", "b", "a", "a", "a"};
  const HostLayout layout = lay_out_by_hosts(hosts, 4);
  EXPECT_TRUE(layout.goes_by_hosts());
  EXPECT_EQ(layout.across, (Ranks{1, 4}));
  EXPECT_EQ(layout.within, (Ranks{3, 4, 5}));
  EXPECT_TRUE(layout.is_host_by_host);
}

TEST(HostLayout, RanksThatAreDealtOut) {
  const Hosts hosts = {"a", "b", "c", "b", "a", "c"};
  const HostLayout layout = lay_out_by_hosts(hosts, 3);
  EXPECT_TRUE(layout.goes_by_hosts());
  EXPECT_EQ(layout.across, (Ranks{4, 3, 5}));
  EXPECT_EQ(layout.within, (Ranks{1, 3}));
  EXPECT_FALSE(layout.is_host_by_host);
}

// Groups of all places and hosts: each rank is in one of each kind, and its
// members see the same group.
TEST(HostLayout, RanksOfAGroupSeeTheSame) {
  for (int num_hosts = 2; num_hosts <= 4; ++num_hosts) {
    for (int per_host = 2; per_host <= 4; ++per_host) {
      for (const bool is_dealt : {false, true}) {
        Hosts hosts;
        for (int i = 0; i < num_hosts * per_host; ++i) {
          hosts.push_back(
              std::to_string(is_dealt ? i % num_hosts : i / per_host));
        }
        for (int i = 0; i < num_hosts * per_host; ++i) {
          const HostLayout own = lay_out_by_hosts(hosts, i);
          ASSERT_EQ(static_cast<int>(own.across.size()), num_hosts);
          ASSERT_EQ(static_cast<int>(own.within.size()), per_host);
          EXPECT_EQ(own.is_host_by_host, !is_dealt);
          for (const int other : own.across) {
            EXPECT_EQ(lay_out_by_hosts(hosts, other).across, own.across);
          }
          for (const int other : own.within) {
            EXPECT_EQ(hosts[other], hosts[i]);
            EXPECT_EQ(lay_out_by_hosts(hosts, other).within, own.within);
          }
        }
      }
    }
  }
}

TEST(HostLayout, ObstaclesAreNamed) {
  EXPECT_EQ(lay_out_by_hosts({"a", "a"}, 1).obstacle,
            "all of its 2 ranks are on host a");
  EXPECT_EQ(lay_out_by_hosts({"a", "b"}, 0).obstacle,
            "each of its 2 hosts has one rank");
  EXPECT_EQ(lay_out_by_hosts({"a", "a", "b", "b", "b"}, 0).obstacle,
            "host a has 2 of its ranks and host b has 3");
  EXPECT_EQ(lay_out_by_hosts({"a", "a", "b"}, 2).obstacle,
            "host a has 2 of its ranks and host b has 1");
  EXPECT_TRUE(lay_out_by_hosts({"a", "a", "b"}, 2).across.empty());
  EXPECT_THROW(lay_out_by_hosts({"a", "b"}, 2), ValueError);
  EXPECT_THROW(lay_out_by_hosts({}, 0), ValueError);
}

}  // namespace
}  // namespace smp::topology
