#include "csrc/lanes/copy_turns.h"

#include <gtest/gtest.h>

#include <string>

#include "csrc/common/check.h"
#include "tests/cpp/lanes/turns_model.h"

namespace smp::lanes {
namespace {

// Turns of rank 1, which has a lower peer and two higher ones.
class CopyTurnsTest : public ::testing::Test {
 protected:
  CopyTurns::Begin note(char name) {
    return [this, name] { begun += name; };
  }

  CopyTurns turns{1};
  std::string begun;
};

TEST_F(CopyTurnsTest, do_not_overlap) {
  turns.add_message(2, 1, note('a'));
  turns.add_message(3, 1, note('b'));
  turns.add_receive(2, note('c'));
  EXPECT_EQ(begun, "a");
  turns.sent();
  EXPECT_EQ(begun, "ab");
  turns.sent();
  EXPECT_EQ(begun, "abc");
  turns.received(2);
  turns.add_message(3, 1, note('d'));
  EXPECT_EQ(begun, "abc") << "rank 2 has not sent";
  turns.add_receipt(2, note('x'));
  EXPECT_EQ(begun, "abcd");
}

TEST_F(CopyTurnsTest, last_until_all_copies_of_a_message_are_enqueued) {
  turns.add_message(2, 2, note('a'));
  turns.add_receive(2, note('b'));
  turns.add_receipt(2, note('1'));
  turns.sent();
  turns.add_receipt(2, note('2'));
  EXPECT_EQ(begun, "a12");
  turns.sent();
  EXPECT_EQ(begun, "a12b");
}

// A copy that waits begins before later copies of the turn that lasts.
TEST_F(CopyTurnsTest, in_a_row_with_one_peer_in_one_direction_overlap) {
  turns.add_message(2, 1, note('a'));
  turns.add_message(2, 1, note('b'));
  EXPECT_EQ(begun, "ab");
  turns.add_receive(2, note('c'));
  turns.add_message(2, 1, note('d'));
  turns.sent();
  EXPECT_EQ(begun, "ab") << "one of both has not ended";
  turns.sent();
  EXPECT_EQ(begun, "abc");
}

TEST_F(CopyTurnsTest, with_a_lower_rank_last_while_this_rank_enqueues) {
  turns.add_message(0, 1, note('a'));
  turns.add_message(0, 1, note('b'));
  EXPECT_EQ(begun, "ab") << "the lower rank has the turn";
  turns.add_receipt(0, note('c'));
  turns.add_receive(0, note('d'));
  EXPECT_EQ(begun, "abc");
  turns.sent();
  EXPECT_EQ(begun, "abcd");
  turns.add_message(2, 1, note('e'));
  turns.received(0);
  EXPECT_EQ(begun, "abcde");
}

TEST_F(CopyTurnsTest, tell_whose_receipt_comes) {
  EXPECT_FALSE(turns.is_sent_receipt(2));
  turns.add_receive(2, note('a'));
  EXPECT_TRUE(turns.is_sent_receipt(2));
  EXPECT_FALSE(turns.is_sent_receipt(3) || turns.is_sent_receipt(0));
  turns.add_receipt(2, note('x'));
  EXPECT_FALSE(turns.is_sent_receipt(2));
  turns.add_message(2, 1, note('b'));
  EXPECT_FALSE(turns.is_sent_receipt(2));
  EXPECT_EQ(begun, "ab");
}

TEST_F(CopyTurnsTest, of_this_rank_alone_are_dropped_at_the_end) {
  turns.add_message(2, 1, note('a'));
  turns.add_receive(3, note('b'));
  turns.add_receipt(0, note('c'));
  turns.add_message(3, 1, note('d'));
  turns.drop_own();
  EXPECT_EQ(begun, "a");
  turns.sent();
  EXPECT_EQ(begun, "ac") << "rank 0 waits for this send";
  turns.sent();
  EXPECT_EQ(begun, "ac");
  EXPECT_THROW(turns.sent(), Error) << "no turn is left";
}

// ------------------------------------------------------------ all the threads

constexpr int kNumRuns = 10'000;

// Returns how many runs get stuck.
int num_stuck(const TurnsRule& rule, int num_runs = kNumRuns) {
  int num_stuck = 0;
  int num_copies = 0;
  for (int seed = 0; seed < num_runs; ++seed) {
    TurnsModel model(static_cast<uint64_t>(seed), rule);
    if (!model.run()) ++num_stuck;
    num_copies += model.num_copies();
  }
  EXPECT_GT(num_copies, 3 * num_runs);
  return num_stuck;
}

TEST(TurnsOfThreads, no_run_gets_stuck) { EXPECT_EQ(num_stuck({}), 0); }

// Else the next tensor of the channel overtakes the receipt, which is refused.
TEST(TurnsOfThreads, receipts_that_leave_when_a_channel_is_free_can) {
  EXPECT_GT(num_stuck({.receipt_follows_end = true}), 0);
}

TEST(TurnsOfThreads, without_an_order_devices_can) {
  EXPECT_GT(num_stuck({.turns_overlap = true}, kNumRuns / 10), 0);
}

}  // namespace
}  // namespace smp::lanes
