#include "csrc/lanes/slot_ring.h"

#include <gtest/gtest.h>

#include "csrc/common/check.h"

namespace smp::lanes {
namespace {

Receipt receipt_of(const SlotRing::Slot& slot) {
  return {LaneKind::kFake, slot.index, slot.sequence};
}

TEST(SlotRing, gives_no_slot_while_all_are_in_use) {
  SlotRing ring(2);
  const auto first = ring.take(1);
  const auto second = ring.take(2);
  ASSERT_TRUE(first && second);
  EXPECT_NE(first->index, second->index);
  EXPECT_FALSE(ring.take(1));
  ring.give_back(2, receipt_of(*second));
  const auto third = ring.take(1);
  ASSERT_TRUE(third);
  EXPECT_EQ(third->index, second->index);
}

// The last reader of a slot that was just freed may still be reading it.
TEST(SlotRing, uses_the_slot_that_was_freed_first) {
  SlotRing ring(3);
  const auto first = ring.take(1);
  const auto second = ring.take(1);
  ring.give_back(1, receipt_of(*second));
  ring.give_back(1, receipt_of(*first));
  EXPECT_EQ(ring.take(1)->index, 2) << "never used";
  EXPECT_EQ(ring.take(1)->index, second->index);
  EXPECT_EQ(ring.take(1)->index, first->index);
}

TEST(SlotRing, numbers_what_goes_to_each_rank) {
  SlotRing ring(4);
  EXPECT_EQ(ring.take(1)->sequence, 0);
  EXPECT_EQ(ring.take(2)->sequence, 0);
  EXPECT_EQ(ring.take(1)->sequence, 1);
}

TEST(SlotRing, a_full_ring_takes_no_number) {
  SlotRing ring(1);
  const auto first = ring.take(1);
  EXPECT_FALSE(ring.take(1));
  ring.give_back(1, receipt_of(*first));
  EXPECT_EQ(ring.take(1)->sequence, 1);
}

TEST(SlotRing, refuses_a_receipt_for_what_was_not_sent) {
  SlotRing ring(2);
  const auto slot = ring.take(1);
  EXPECT_THROW(ring.give_back(2, receipt_of(*slot)), Error) << "another rank";
  EXPECT_THROW(ring.give_back(1, {LaneKind::kFake, slot->index, 7}), Error);
  EXPECT_THROW(ring.give_back(1, {LaneKind::kFake, 5, 0}), Error);
  EXPECT_EQ(ring.num_free(), 1);
  ring.give_back(1, receipt_of(*slot));
  EXPECT_EQ(ring.num_free(), 2);
  EXPECT_THROW(ring.give_back(1, receipt_of(*slot)), Error) << "twice";
}

TEST(ArrivalOrder, notices_what_was_lost) {
  ArrivalOrder order;
  order.check(1, {.sequence = 0});
  order.check(2, {.sequence = 0});
  order.check(1, {.sequence = 1});
  EXPECT_THROW(order.check(1, {.sequence = 3}), Error);
  EXPECT_THROW(order.check(2, {.sequence = 0}), Error) << "twice";
}

}  // namespace
}  // namespace smp::lanes
