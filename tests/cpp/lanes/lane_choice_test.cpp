#include "csrc/lanes/lane_choice.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/lanes/byte_strings.h"
#include "tests/cpp/lanes/lane_facts.h"

namespace smp::lanes {
namespace {

// Two ranks of one host that reach each other, a third one of it that no rank
// reaches though it reaches all, and one elsewhere.
std::vector<LaneFacts> four_ranks() {
  return {rank_on("x", "a", {"a", "b"}), rank_on("x", "b", {"b", "a"}),
          rank_on("x", "c", {"c", "a", "b"}), rank_on("y", "a", {"a", "b"})};
}

std::vector<LaneFacts> with_mode(std::vector<LaneFacts> all,
                                 const std::string& mode) {
  for (LaneFacts& facts : all) facts.mode = mode;
  return all;
}

TEST(LaneChoice, is_made_by_pair_and_the_same_both_ways) {
  const LaneChoices choices = choose_lanes(four_ranks());
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) {
      if (a == b) continue;
      const bool is_ipc = a + b == 1;
      EXPECT_EQ(choices[a][b].kind, is_ipc ? LaneKind::kIpc : LaneKind::kHost)
          << a << b;
    }
  }
  expect_words(choices[0][2].reason,
               "device of global_rank 0 cannot read that of global_rank 2");
  expect_words(choices[3][0].reason, "different hosts");
}

TEST(LaneChoice, ranks_that_share_a_device_reach_each_other) {
  const std::vector<LaneFacts> all(2, rank_on("x", "a", {"a"}));
  EXPECT_EQ(choose_lanes(all)[1][0].kind, LaneKind::kIpc);
}

TEST(LaneChoice, ranks_of_other_pipelines_have_none_and_are_not_refused) {
  std::vector<LaneFacts> all = four_ranks();
  for (int rank = 0; rank < 4; ++rank) all[rank].pipeline = rank / 2;
  for (const std::string mode : {"auto", "host"}) {
    const LaneChoices choices = choose_lanes(with_mode(all, mode));
    EXPECT_TRUE(choices[0][1].kind && choices[2][3].kind);
    EXPECT_FALSE(choices[0][2].kind || choices[3][1].kind);
    EXPECT_FALSE(choices[0][0].kind);
  }
  all[2].pipeline = 2;  // nor does one that is alone need a lane
  EXPECT_EQ(choose_lanes(with_mode(all, "ipc"))[1][0].kind, LaneKind::kIpc);
}

TEST(LaneChoice, a_rank_that_cannot_says_why) {
  std::vector<LaneFacts> all(2, rank_on("x", "a", {"a"}));
  all[1].why_not = "no CUDA code";
  EXPECT_EQ(choose_lanes(all)[0][1].kind, LaneKind::kHost);
  EXPECT_EQ(choose_lanes(all)[0][1].reason,
            "global_rank 1: no CUDA code; no NCCL: global_rank 0: no NCCL");
}

TEST(LaneChoice, can_be_forced_where_it_can_be) {
  const std::vector<LaneFacts> all(2, rank_on("x", "a", {"a"}));
  EXPECT_EQ(choose_lanes(with_mode(all, "ipc"))[0][1].kind, LaneKind::kIpc);
  const LaneChoice choice = choose_lanes(with_mode(all, "host"))[0][1];
  EXPECT_EQ(choice.kind, LaneKind::kHost);
  EXPECT_EQ(choice.reason, "SMP_LANE=host");
  const std::string text =
      refusal_of([] { choose_lanes(with_mode(four_ranks(), "ipc")); });
  expect_words(text, "global_ranks 0 and 2 cannot share memory");
  expect_words(text, "SMP_LANE=auto");
}

// Returns the facts of four_ranks, with NCCL on all ranks.
std::vector<LaneFacts> four_with_nccl() {
  std::vector<LaneFacts> all = four_ranks();
  for (LaneFacts& facts : all) facts.why_no_nccl.clear();
  return all;
}

TEST(LaneChoice, nccl_is_for_pairs_that_cannot_map_memory) {
  const LaneChoices choices = choose_lanes(four_with_nccl());
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) {
      if (a == b) continue;
      EXPECT_EQ(choices[a][b].kind,
                a + b == 1 ? LaneKind::kIpc : LaneKind::kNccl)
          << a << b;
    }
  }
  expect_words(choices[3][0].reason, "different hosts");
  std::vector<LaneFacts> all = four_with_nccl();
  all[3].why_no_nccl = "no NCCL";
  expect_words(choose_lanes(all)[0][3].reason,
               "different hosts; no NCCL: global_rank 3: no NCCL");
  EXPECT_EQ(choose_lanes(all)[0][3].kind, LaneKind::kHost);
}

TEST(LaneChoice, nccl_can_be_forced_where_it_can_be) {
  EXPECT_EQ(choose_lanes(with_mode(four_with_nccl(), "nccl"))[0][1].kind,
            LaneKind::kNccl);
  std::vector<LaneFacts> all = with_mode(four_with_nccl(), "nccl");
  all[2].why_no_nccl = "no NCCL";
  const std::string text = refusal_of([&] { choose_lanes(all); });
  expect_words(text,
               "SMP_LANE=nccl: global_ranks 0 and 2 cannot use NCCL: "
               "global_rank 2: no NCCL");
  expect_words(text, "SMP_LANE=auto");
}

TEST(LaneChoice, launches_that_block_leave_out_nccl) {
  EXPECT_EQ(why_no_nccl_with(""), "");
  EXPECT_EQ(why_no_nccl_with("0"), "");
  std::vector<LaneFacts> all = four_with_nccl();
  all[3].why_no_nccl = why_no_nccl_with("1");
  EXPECT_EQ(choose_lanes(all)[0][1].kind, LaneKind::kIpc);
  EXPECT_EQ(choose_lanes(all)[0][2].kind, LaneKind::kNccl);
  EXPECT_EQ(choose_lanes(all)[0][3].kind, LaneKind::kHost);
  expect_words(choose_lanes(all)[0][3].reason,
               "global_rank 3: with CUDA_LAUNCH_BLOCKING=1");
  expect_words(refusal_of([&] { choose_lanes(with_mode(all, "nccl")); }),
               "CUDA_LAUNCH_BLOCKING=1");
}

TEST(LaneChoice, ranks_that_share_a_device_have_no_nccl) {
  std::vector<LaneFacts> all(2, four_with_nccl()[0]);
  expect_words(refusal_of([&] { choose_lanes(with_mode(all, "nccl")); }),
               "they share one");
  all[1].nccl_host = "another";  // so NCCL takes it for another host
  EXPECT_EQ(choose_lanes(with_mode(all, "nccl"))[0][1].kind, LaneKind::kNccl);
  all[0].nccl_host = "another";
  expect_words(refusal_of([&] { choose_lanes(with_mode(all, "nccl")); }),
               "they share one");
}

TEST(LaneChoice, what_comes_after_a_lane_that_fails) {
  const std::vector<LaneFacts> all = four_with_nccl();
  LaneChoice next = choose_after(LaneKind::kIpc, 0, 1, all, "broken");
  EXPECT_EQ(next.kind, LaneKind::kNccl);
  EXPECT_EQ(next.reason, "broken");
  EXPECT_EQ(choose_after(LaneKind::kNccl, 0, 1, all, "broken").kind,
            LaneKind::kHost);
  EXPECT_EQ(choose_after(LaneKind::kIpc, 0, 1, four_ranks(), "broken").kind,
            LaneKind::kHost);
  for (const auto& [kind, mode] :
       {std::pair{LaneKind::kIpc, "ipc"}, std::pair{LaneKind::kNccl, "nccl"}}) {
    expect_words(refusal_of([&, which = kind, word = mode] {
                   choose_after(which, 1, 0, with_mode(all, word), "broken");
                 }),
                 "global_ranks 0 and 1 cannot");
  }
}

TEST(LaneChoice, what_ranks_do_not_have_in_common_is_refused) {
  std::vector<LaneFacts> all = four_ranks();
  all[2].mode = "host";
  expect_words(refusal_of([&] { choose_lanes(all); }),
               "global_rank 0 has 'auto', global_rank 2 has 'host'");
  expect_words(refusal_of([&] { choose_lanes(with_mode(all, "nvlink")); }),
               "auto, ipc, nccl or host");
  all = four_ranks();
  all[3].slot_bytes = 1;
  expect_words(refusal_of([&] { choose_lanes(all); }), "SMP_LANE_SLOT_MB");
}

TEST(LaneChoice, byte_strings_come_back_and_cut_ones_do_not) {
  const std::vector<std::string> strings{"", std::string("a\0b", 3), "c"};
  const std::string packed = pack(strings);
  EXPECT_EQ(unpack(packed), strings);
  EXPECT_THROW(unpack(packed.substr(0, packed.size() - 1)), Error);
  EXPECT_TRUE(unpack("").empty());
}

}  // namespace
}  // namespace smp::lanes
