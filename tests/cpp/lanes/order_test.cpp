// Devices never wait for each other in a circle, and the model would show it if
// they did.

#include <gtest/gtest.h>

#include "tests/cpp/lanes/order_model.h"

namespace smp::lanes {
namespace {

constexpr int kNumGraphs = 10'000;

struct Tally {
  int num_stuck = 0;
  int64_t num_over_lanes = 0;
  int64_t num_through_hosts = 0;
};

Tally run_graphs(const OrderRule& rule, int num_graphs = kNumGraphs) {
  Tally tally;
  for (int seed = 0; seed < num_graphs; ++seed) {
    OrderModel model(static_cast<uint64_t>(seed), rule);
    if (!model.run()) ++tally.num_stuck;
    tally.num_over_lanes += model.num_over_lanes();
    tally.num_through_hosts += model.num_through_hosts();
  }
  return tally;
}

class Order : public ::testing::TestWithParam<bool> {};

TEST_P(Order, no_graph_gets_stuck) {
  const Tally tally = run_graphs({.has_rendezvous = GetParam()});
  EXPECT_EQ(tally.num_stuck, 0);
  // Both channels are taken, else nothing is said about them.
  EXPECT_GT(tally.num_over_lanes, kNumGraphs);
  EXPECT_GT(tally.num_through_hosts, kNumGraphs / 2);
}

TEST_P(Order, a_header_that_leaves_before_its_producer_is_asked_for_can) {
  const Tally tally = run_graphs(
      {.has_rendezvous = GetParam(), .header_before_producer = true});
  EXPECT_GT(tally.num_stuck, kNumGraphs / 100);
}

TEST(OrderOfStreams, both_ways_on_one_stream_can_where_copies_meet) {
  const Tally tally =
      run_graphs({.has_rendezvous = true, .one_stream_for_both_ways = true});
  EXPECT_GT(tally.num_stuck, kNumGraphs / 100);
}

// Each copy waits for what was asked for before it, whatever the stream.
TEST(OrderOfStreams,
     both_ways_on_one_stream_cannot_where_one_copy_follows_the_other) {
  EXPECT_EQ(run_graphs({.one_stream_for_both_ways = true}).num_stuck, 0);
}

// One copy at most on each channel, as NcclLane has it.
TEST(OrderOfLaunches, no_graph_gets_stuck) {
  const Tally tally = run_graphs({.has_rendezvous = true,
                                  .has_launch_order = true,
                                  .waits_for_last_copy = true});
  EXPECT_EQ(tally.num_stuck, 0);
  EXPECT_GT(tally.num_over_lanes, kNumGraphs);
  EXPECT_GT(tally.num_through_hosts, kNumGraphs / 2);
}

// A second copy of the channel waits for the first one, and with it all that
// its host has asked for since; among that may be what the first one waits for.
TEST(OrderOfLaunches, a_copy_behind_one_that_is_not_over_can) {
  const Tally tally = run_graphs({.has_rendezvous = true,
                                  .has_launch_order = true,
                                  .has_endless_slots = true});
  EXPECT_GT(tally.num_stuck, kNumGraphs / 1000);
  // The order of launches alone makes them wait in a circle.
  EXPECT_EQ(
      run_graphs({.has_rendezvous = true, .has_endless_slots = true}).num_stuck,
      0);
}

// Devices whose streams share queues, by the number of queues. The last two
// tests show what is not enough.
class OrderOfQueues : public ::testing::TestWithParam<int> {
 protected:
  // More queues than the model has streams make no difference.
  static constexpr int kManyQueues = 32;

  // Copies as NcclLane makes them, but for `has_turns`.
  static OrderRule rule_with(bool head_blocks_until_over) {
    return {.has_rendezvous = true,
            .has_launch_order = true,
            .waits_for_last_copy = true,
            .num_queues = GetParam(),
            .head_blocks_until_over = head_blocks_until_over};
  }
  static int num_stuck(const OrderRule& rule) {
    return run_graphs(rule, kNumGraphs / 10).num_stuck;
  }
};

TEST_P(OrderOfQueues, no_graph_gets_stuck_where_copies_have_turns) {
  for (const bool head_blocks_until_over : {false, true}) {
    OrderRule rule = rule_with(head_blocks_until_over);
    rule.has_turns = true;
    const Tally tally = run_graphs(rule);
    EXPECT_EQ(tally.num_stuck, 0);
    EXPECT_GT(tally.num_over_lanes, kNumGraphs);
    EXPECT_GT(tally.num_through_hosts, kNumGraphs / 2);
    rule.has_launch_order = false;
    EXPECT_EQ(num_stuck(rule), 0);
  }
}

TEST_P(OrderOfQueues, without_turns_a_copy_blocks_others_until_it_is_over) {
  EXPECT_EQ(num_stuck(rule_with(false)), 0)
      << "here a copy that has begun lets others begin";
  OrderRule rule = rule_with(true);
  // With more queues too few streams of the model share one.
  EXPECT_EQ(num_stuck(rule) > 0, GetParam() <= 2);
  rule.joins_copies_of_pair = true;
  EXPECT_EQ(num_stuck(rule) > 0, GetParam() <= 2)
      << "three ranks that send in a ring";
}

// Work that a receiver asks for behind its receiving blocks a sending that it
// asks for later, although the message about that has left.
TEST_P(OrderOfQueues, sends_that_follow_their_producers_can) {
  for (const bool head_blocks_until_over : {false, true}) {
    OrderRule rule = rule_with(head_blocks_until_over);
    rule.send_follows_producer = true;
    EXPECT_EQ(num_stuck(rule) > 0, GetParam() < kManyQueues);
    rule.header_follows_send = true;
    EXPECT_EQ(num_stuck(rule) > 0, head_blocks_until_over && GetParam() <= 2);
  }
}

INSTANTIATE_TEST_SUITE_P(Queues, OrderOfQueues, ::testing::Values(1, 2, 8, 32),
                         ::testing::PrintToStringParamName());

INSTANTIATE_TEST_SUITE_P(Copies, Order, ::testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "meet" : "follow";
                         });

}  // namespace
}  // namespace smp::lanes
