#include "csrc/topology/process_grid.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "csrc/common/check.h"

namespace smp::topology {
namespace {

constexpr GroupKind kAllKinds[] = {
    GroupKind::kWorld, GroupKind::kMp,  GroupKind::kDp, GroupKind::kPp,
    GroupKind::kTp,    GroupKind::kRdp, GroupKind::kCp, GroupKind::kDpCp,
    GroupKind::kRdpCp, GroupKind::kTpCp};
constexpr const char* kAllPlacements[] = {"DPT", "DTP", "PDT",  "PTD",
                                          "TDP", "TPD", "CPTD", "PDCT"};

/// All degrees of a world.
template <typename Check>
void for_all_factorings(int world, const Check& check) {
  for (int pp = 1; pp <= world; ++pp) {
    for (int tp = 1; pp * tp <= world; ++tp) {
      for (int cp = 1; pp * tp * cp <= world; ++cp) {
        if (world % (pp * tp * cp) == 0) check(pp, tp, cp);
      }
    }
  }
}

TEST(ProcessGrid, OddSizesFollowTheFormula) {
  const ProcessGrid grid(12, 2, 3, 1, "PTD");  // rdp 2
  const Coordinates c = grid.coordinates(9);
  EXPECT_EQ(c.pp, 1);
  EXPECT_EQ(c.tp, 1);
  EXPECT_EQ(c.rdp, 1);
  EXPECT_EQ(grid.describe(9), "pp 1 tp 1 rdp 1");
}

TEST(ProcessGrid, ContextRanksFollowTheFormula) {
  const ProcessGrid grid(24, 2, 3, 2, "DCPT");  // rdp 2
  const Coordinates c = grid.coordinates(((1 * 2 + 0) * 2 + 1) * 3 + 2);
  EXPECT_EQ(c.rdp, 1);
  EXPECT_EQ(c.cp, 0);
  EXPECT_EQ(c.pp, 1);
  EXPECT_EQ(c.tp, 2);
  EXPECT_EQ(grid.describe(17), "pp 1 tp 2 cp 0 rdp 1");
}

TEST(ProcessGrid, ContextRanksAreBesideTensorRanksOnTheSideOfReplicas) {
  const std::pair<const char*, const char*> beside[] = {
      {"cluster", "DPCT"}, {"spread", "TCPD"}, {"DPT", "DPCT"},
      {"TPD", "TCPD"},     {"DTP", "DCTP"},    {"TDP", "TCDP"},
      {"PTD", "PTCD"},     {"PDT", "PDCT"},    {"CDTP", "CDTP"}};
  for (const auto& [given, letters] : beside) {
    EXPECT_EQ(ProcessGrid(16, 2, 2, 2, given).placement(), letters) << given;
    std::string three = letters;
    three.erase(three.find('C'), 1);
    EXPECT_EQ(ProcessGrid(16, 2, 2, 1, given).placement(), three) << given;
  }
}

TEST(ProcessGrid, GroupsOfBatchesLeaveOutContextRanks) {
  const ProcessGrid grid(16, 2, 2, 2, "DPCT");
  const auto group = [&](GroupKind kind) { return grid.group(kind, 5); };
  using Ranks = std::vector<int>;
  EXPECT_EQ(group(GroupKind::kCp), (Ranks{5, 7}));
  EXPECT_EQ(group(GroupKind::kTp), (Ranks{4, 5}));
  EXPECT_EQ(group(GroupKind::kTpCp), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(group(GroupKind::kPp), (Ranks{1, 5}));
  EXPECT_EQ(group(GroupKind::kMp), (Ranks{0, 1, 4, 5}));
  EXPECT_EQ(group(GroupKind::kRdp), (Ranks{5, 13}));
  EXPECT_EQ(group(GroupKind::kRdpCp), (Ranks{5, 7, 13, 15}));
  EXPECT_EQ(group(GroupKind::kDp), (Ranks{4, 5, 12, 13}));
  EXPECT_EQ(group(GroupKind::kDpCp), (Ranks{4, 5, 6, 7, 12, 13, 14, 15}));
}

TEST(ProcessGrid, WithoutContextRanksKindsOfParametersAreThoseOfBatches) {
  for (const char* placement : kAllPlacements) {
    const ProcessGrid grid(8, 2, 2, 1, placement);
    EXPECT_EQ(grid.groups(GroupKind::kDpCp), grid.groups(GroupKind::kDp));
    EXPECT_EQ(grid.groups(GroupKind::kRdpCp), grid.groups(GroupKind::kRdp));
    EXPECT_EQ(grid.groups(GroupKind::kTpCp), grid.groups(GroupKind::kTp));
    EXPECT_EQ(grid.group_size(GroupKind::kCp), 1);
  }
}

// Three hosts of eight: tensor-parallel groups of `cluster` and pipelines of
// `TPD` stay together; the other axis crosses hosts.
TEST(ProcessGrid, SixStagesOfFourTensorRanksFillTwentyFour) {
  using Ranks = std::vector<int>;
  const ProcessGrid near(24, 6, 4, 1, "cluster");
  EXPECT_EQ(near.placement(), "DPT");
  EXPECT_EQ(near.group(GroupKind::kTp, 13), (Ranks{12, 13, 14, 15}));
  EXPECT_EQ(near.group(GroupKind::kPp, 13), (Ranks{1, 5, 9, 13, 17, 21}));
  EXPECT_EQ(near.group(GroupKind::kRdp, 13), (Ranks{13}));
  EXPECT_EQ(near.group(GroupKind::kDp, 13), (Ranks{12, 13, 14, 15}));
  EXPECT_EQ(near.group(GroupKind::kMp, 13).size(), 24u);
  EXPECT_EQ(near.describe(13), "pp 3 tp 1 rdp 0");
  const ProcessGrid far(24, 6, 4, 1, "spread");
  EXPECT_EQ(far.placement(), "TPD");
  EXPECT_EQ(far.group(GroupKind::kTp, 13), (Ranks{1, 7, 13, 19}));
  EXPECT_EQ(far.group(GroupKind::kPp, 13), (Ranks{12, 13, 14, 15, 16, 17}));
  EXPECT_EQ(far.describe(13), "pp 1 tp 2 rdp 0");
}

/// Checks that each rank is in exactly one group of a kind, at its place.
void expect_partition(const ProcessGrid& grid, GroupKind kind) {
  std::set<int> seen;
  for (const auto& group : grid.groups(kind)) {
    ASSERT_EQ(static_cast<int>(group.size()), grid.group_size(kind));
    for (size_t i = 0; i < group.size(); ++i) {
      ASSERT_TRUE(seen.insert(group[i]).second);
      ASSERT_EQ(grid.group(kind, group[i]), group);
      ASSERT_EQ(grid.group_rank(kind, group[i]), static_cast<int>(i));
    }
  }
  ASSERT_EQ(static_cast<int>(seen.size()), grid.world_size());
}

TEST(ProcessGrid, GroupsOfAnyKindPartitionTheWorld) {
  for (int world = 1; world <= 16; ++world) {
    for_all_factorings(world, [&](int pp, int tp, int cp) {
      for (const char* placement : kAllPlacements) {
        const ProcessGrid grid(world, pp, tp, cp, placement);
        for (const GroupKind kind : kAllKinds) expect_partition(grid, kind);
        for (int rank = 0; rank < world; ++rank) {
          ASSERT_EQ(grid.global_rank(grid.coordinates(rank)), rank);
        }
      }
    });
  }
}

TEST(ProcessGrid, RefusesWhatDoesNotFit) {
  EXPECT_THROW(ProcessGrid(8, 3, 1, 1, "cluster"), ValueError);
  EXPECT_THROW(ProcessGrid(8, 2, 1, 3, "cluster"), ValueError);
  EXPECT_THROW(ProcessGrid(8, 0, 1, 1, "cluster"), ValueError);
  EXPECT_THROW(ProcessGrid(8, 2, 1, 0, "cluster"), ValueError);
  EXPECT_THROW(ProcessGrid(8, 2, 1, 1, "DPP"), ValueError);
  EXPECT_THROW(ProcessGrid(8, 2, 1, 1, "DPCC"), ValueError);
  EXPECT_THROW(ProcessGrid(8, 2, 1, 1, "dpt"), ValueError);
  const ProcessGrid grid(8, 2, 1, 1, "cluster");
  EXPECT_THROW(grid.coordinates(8), ValueError);
  EXPECT_THROW(grid.global_rank({2, 0, 0}), ValueError);
  EXPECT_THROW(grid.global_rank({0, 0, 0, 1}), ValueError);
  EXPECT_THROW(parse_group_kind("ep"), ValueError);
}

}  // namespace
}  // namespace smp::topology
