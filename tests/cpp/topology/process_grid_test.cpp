#include "csrc/topology/process_grid.h"

#include <gtest/gtest.h>

#include <set>

#include "csrc/common/check.h"

namespace smp::topology {
namespace {

constexpr GroupKind kAllKinds[] = {GroupKind::kWorld, GroupKind::kMp,
                                   GroupKind::kDp,    GroupKind::kPp,
                                   GroupKind::kTp,    GroupKind::kRdp};
constexpr const char* kAllPlacements[] = {"DPT", "DTP", "PDT",
                                          "PTD", "TDP", "TPD"};

TEST(ProcessGrid, OddSizesFollowTheFormula) {
  const ProcessGrid grid(12, 2, 3, "PTD");  // rdp 2
  const Coordinates c = grid.coordinates(9);
  EXPECT_EQ(c.pp, 1);
  EXPECT_EQ(c.tp, 1);
  EXPECT_EQ(c.rdp, 1);
  EXPECT_EQ(grid.describe(9), "pp 1 tp 1 rdp 1");
}

TEST(ProcessGrid, GroupsOfAnyKindPartitionTheWorld) {
  for (int world = 1; world <= 16; ++world) {
    for (int pp = 1; pp <= world; ++pp) {
      for (int tp = 1; pp * tp <= world; ++tp) {
        if (world % (pp * tp) != 0) continue;
        for (const char* placement : kAllPlacements) {
          const ProcessGrid grid(world, pp, tp, placement);
          for (const GroupKind kind : kAllKinds) {
            std::set<int> seen;
            for (const auto& group : grid.groups(kind)) {
              ASSERT_EQ(static_cast<int>(group.size()), grid.group_size(kind));
              for (size_t i = 0; i < group.size(); ++i) {
                ASSERT_TRUE(seen.insert(group[i]).second);
                ASSERT_EQ(grid.group(kind, group[i]), group);
                ASSERT_EQ(grid.group_rank(kind, group[i]), static_cast<int>(i));
              }
            }
            ASSERT_EQ(static_cast<int>(seen.size()), world);
          }
        }
      }
    }
  }
}

TEST(ProcessGrid, RefusesWhatDoesNotFit) {
  EXPECT_THROW(ProcessGrid(8, 3, 1, "cluster"), ValueError);
  EXPECT_THROW(ProcessGrid(8, 0, 1, "cluster"), ValueError);
  EXPECT_THROW(ProcessGrid(8, 2, 1, "DPP"), ValueError);
  EXPECT_THROW(ProcessGrid(8, 2, 1, "dpt"), ValueError);
  const ProcessGrid grid(8, 2, 1, "cluster");
  EXPECT_THROW(grid.coordinates(8), ValueError);
  EXPECT_THROW(grid.global_rank({2, 0, 0}), ValueError);
  EXPECT_THROW(parse_group_kind("ep"), ValueError);
}

}  // namespace
}  // namespace smp::topology
