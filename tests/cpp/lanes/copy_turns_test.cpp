#include "csrc/lanes/copy_turns.h"

#include <gtest/gtest.h>

#include <string>

namespace smp::lanes {
namespace {

class CopyTurnsTest : public ::testing::Test {
 protected:
  void add(int peer, bool is_send, char name) {
    turns.add(peer, is_send, [this, name] { begun += name; });
  }

  CopyTurns turns;
  std::string begun;
};

TEST_F(CopyTurnsTest, do_not_overlap) {
  add(1, true, 'a');
  add(2, true, 'b');
  add(1, false, 'c');
  EXPECT_EQ(begun, "a");
  turns.end();
  EXPECT_EQ(begun, "ab");
  turns.end();
  EXPECT_EQ(begun, "abc");
  turns.end();
  add(2, true, 'd');
  EXPECT_EQ(begun, "abcd");
}

// The tensors of one message, which leaves when all turns have begun.
TEST_F(CopyTurnsTest, overlap_with_one_peer_in_one_direction) {
  add(1, true, 'a');
  add(1, false, 'b');
  add(1, true, 'c');
  EXPECT_EQ(begun, "ac");
  turns.end();
  EXPECT_EQ(begun, "ac") << "one of both has not ended";
  turns.end();
  EXPECT_EQ(begun, "acb");
}

TEST_F(CopyTurnsTest, begin_together_also_after_a_wait) {
  add(1, true, 'a');
  add(2, true, 'b');
  add(3, true, 'c');
  add(2, true, 'd');
  turns.end();
  EXPECT_EQ(begun, "abd");
}

TEST_F(CopyTurnsTest, tell_what_has_begun) {
  EXPECT_FALSE(turns.receives_from(1));
  add(1, false, 'a');
  EXPECT_TRUE(turns.receives_from(1));
  EXPECT_FALSE(turns.receives_from(2));
  turns.end();
  EXPECT_FALSE(turns.receives_from(1));
  add(1, true, 'b');
  EXPECT_FALSE(turns.receives_from(1));
}

TEST_F(CopyTurnsTest, that_wait_are_dropped) {
  add(1, true, 'a');
  add(2, true, 'b');
  turns.drop_waiting();
  turns.end();
  EXPECT_EQ(begun, "a");
}

}  // namespace
}  // namespace smp::lanes
