// Messages whose lane blocks who takes their tensors.

#include "csrc/mailbox/held_arrivals.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "csrc/mailbox/lane_posts.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/mailbox/lane_rank.h"

namespace smp::mailbox {
namespace {

using lanes::FakeOptions;
using std::chrono::milliseconds;

constexpr milliseconds kAMoment{60};
constexpr FakeOptions kPrompt{.num_slots = 4};
// Options of a rank that never finishes taking its first tensor.
constexpr FakeOptions kBlocked{
    .num_slots = 4, .num_ending = 0, .has_late_takes = true};

void wait_until(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while (!condition() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_TRUE(condition());
}

int64_t num_under_way(const LaneRank& rank) {
  return rank.board->waits().snapshot().num_unsent;
}

// Rank 0 sends a plain message, one with a tensor, and another plain one; rank
// 1 cannot take the tensor.
void run_blocked(int num_ranks,
                 const std::function<void(int, LaneRank&)>& body) {
  comm::run_ranks(num_ranks, [&](int self, const comm::CommunicatorPtr& world) {
    LaneRank rank(self, world, self == 1 ? kBlocked : kPrompt);
    if (self == 0) {
      rank.mailbox.post(1, with_tensors(7));
      rank.mailbox.post(1, with_tensors(8, {{.data = filled(1)}}));
      rank.mailbox.post(1, with_tensors(9));
    } else if (self == 1) {
      wait_until([&] { return num_under_way(rank) == 2; });
    }
    body(self, rank);
  });
}

TEST(HeldArrivals, what_a_rank_sends_later_waits_behind_it) {
  run_blocked(2, [](int self, LaneRank& rank) {
    if (self == 0) return;
    std::this_thread::sleep_for(kAMoment);
    EXPECT_EQ(rank.num_messages(), 1u);
    EXPECT_EQ(rank.wait_for(1)[0].fields[0], 7);
    EXPECT_EQ(num_under_way(rank), 2) << "else ranks that wait are deadlocked";
    EXPECT_EQ(rank.mailbox.num_unsent(), 0) << "they are no posts of this rank";
  });
}

TEST(HeldArrivals, what_other_ranks_send_does_not_wait) {
  run_blocked(3, [](int self, LaneRank& rank) {
    if (self == 2) rank.mailbox.post(1, with_tensors(20));
    if (self == 1) {
      const auto came = rank.wait_for(2);
      EXPECT_EQ(came[0].fields[0] + came[1].fields[0], 27);
      EXPECT_EQ(num_under_way(rank), 2);
    }
  });
}

// Else a ring would be full although its slots are free.
TEST(HeldArrivals, receipts_do_not_wait) {
  FakeOptions one_slot = kBlocked;
  one_slot.num_slots = 1;
  LanePosts posts({.source = lanes::fake_source(one_slot)},
                  {.global_rank = 1,
                   .faults = std::make_shared<health::FaultBoard>(1),
                   .deliver = {}},
                  2, [](int, Message&&) {});
  const auto num_full = [&] { return posts.table().counters().times_full; };
  Message held = with_tensors(1, {{.data = filled(1)}});
  held.source_rank = 0;
  held.tensors[0].lane = std::make_shared<const lanes::Descriptor>(
      lanes::Descriptor{.lane = lanes::LaneKind::kFake, .slot = 0});
  EXPECT_FALSE(posts.receive(held));
  posts.post(0, with_tensors(2, {{.data = filled(2)}}));
  posts.post(0, with_tensors(3, {{.data = filled(3)}}));
  EXPECT_EQ(num_full(), 1);
  Message receipt;
  receipt.channel = Channel::kLane;
  receipt.source_rank = 0;
  receipt.fields = {static_cast<int64_t>(lanes::LaneKind::kFake), 0, 0};
  EXPECT_FALSE(posts.receive(receipt));
  posts.post(0, with_tensors(4, {{.data = filled(4)}}));
  EXPECT_EQ(num_full(), 1) << "the slot is free";
  posts.stop();
}

TEST(HeldArrivals, are_given_up_at_the_end) {
  run_blocked(2, [](int self, LaneRank& rank) {
    if (self == 0) return;
    rank.mailbox.close(std::chrono::hours(1));
    EXPECT_EQ(rank.num_messages(), 1u);
    EXPECT_EQ(num_under_way(rank), 0);
    EXPECT_FALSE(rank.board->fault());
  });
}

TEST(HeldArrivals, a_fault_ends_what_they_wait_for) {
  run_blocked(2, [](int self, LaneRank& rank) {
    if (self == 0) return;
    rank.board->report({.kind = health::Fault::Kind::kDied,
                        .global_rank = 0,
                        .text = "it is gone"});
    wait_until([&] { return num_under_way(rank) == 0; });
    EXPECT_EQ(rank.board->fault()->global_rank, 0) << "the first one counts";
    for (const Message& message : rank.wait_for(1)) {
      EXPECT_NE(message.fields[0], 8) << "without its tensor";
    }
  });
}

TEST(HeldArrivals, a_tensor_that_cannot_be_taken_is_a_fault) {
  const auto board = std::make_shared<health::FaultBoard>(1);
  HeldArrivals held(
      {.global_rank = 1, .faults = board, .deliver = {}}, 2,
      [](Message& /*message*/) { throw std::runtime_error("it is lost"); });
  Message message = with_tensors(1);
  message.source_rank = 0;
  EXPECT_TRUE(held.hold(message, true));
  wait_until([&] { return board->fault().has_value(); });
  const std::string text = board->fault()->describe();
  EXPECT_NE(text.find("it is lost"), std::string::npos) << text;
  EXPECT_NE(text.find("from global_rank 0"), std::string::npos) << text;
}

TEST(HeldArrivals, nothing_follows_what_was_given_up) {
  const auto board = std::make_shared<health::FaultBoard>(1);
  int num_delivered = 0;
  HeldArrivals held(
      {.global_rank = 1,
       .faults = board,
       .deliver = [&](Message&& /*message*/) { ++num_delivered; }},
      2, [](Message& /*message*/) {});
  Message message = with_tensors(1);
  message.source_rank = 0;
  EXPECT_FALSE(held.hold(message, false)) << "nothing waits";
  EXPECT_TRUE(held.hold(message, true));
  wait_until([&] { return held.num_held() == 0; });
  EXPECT_EQ(num_delivered, 1);
  message = with_tensors(2);
  message.source_rank = 0;
  EXPECT_FALSE(held.hold(message, false)) << "nothing waits any more";
  held.begin_end();
  EXPECT_TRUE(held.hold(message, true)) << "given up";
  message = with_tensors(3);
  message.source_rank = 0;
  EXPECT_TRUE(held.hold(message, false)) << "behind one that was given up";
  message.source_rank = 1;
  EXPECT_FALSE(held.hold(message, false)) << "of another rank";
  held.end();
  EXPECT_EQ(num_delivered, 1);
}

}  // namespace
}  // namespace smp::mailbox
