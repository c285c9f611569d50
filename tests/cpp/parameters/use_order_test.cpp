#include "csrc/parameters/use_order.h"

#include <gtest/gtest.h>

namespace smp::parameters {
namespace {

void run(UseOrder& order, int64_t kind, const std::vector<int>& units) {
  order.begin(kind);
  for (const int unit : units) order.use(unit);
  order.end();
}

TEST(UseOrder, a_pass_is_expected_to_go_like_the_last_one_of_its_kind) {
  UseOrder order;
  order.begin(4);
  EXPECT_TRUE(order.next(9).empty());
  EXPECT_TRUE(order.use(0));
  EXPECT_TRUE(order.use(1));
  EXPECT_TRUE(order.next(9).empty());
  order.end();
  run(order, 5, {2});
  order.begin(4);
  EXPECT_EQ(order.next(9), (std::vector<int>{0, 1}));
  EXPECT_TRUE(order.use(0));
  EXPECT_EQ(order.next(9), (std::vector<int>{1}));
  EXPECT_TRUE(order.use(1));
  EXPECT_TRUE(order.use(1)) << "more than last time is no other order";
}

TEST(UseOrder, a_deviation_ends_expectations_and_is_what_comes_next_time) {
  UseOrder order;
  run(order, 0, {0, 1, 2});
  order.begin(0);
  EXPECT_TRUE(order.use(0));
  EXPECT_FALSE(order.use(2));
  EXPECT_TRUE(order.next(9).empty());
  EXPECT_TRUE(order.use(7)) << "told once";
  order.end();
  order.begin(0);
  EXPECT_EQ(order.next(9), (std::vector<int>{0, 2, 7}));
}

TEST(UseOrder, what_is_next_are_units_not_uses) {
  UseOrder order;
  run(order, 0, {0, 1, 1, 0, 2});
  order.begin(0);
  EXPECT_EQ(order.next(2), (std::vector<int>{0, 1}));
  order.use(0);
  EXPECT_EQ(order.next(2), (std::vector<int>{1, 0}));
}

TEST(UseOrder, nothing_is_learnt_from_a_pass_without_uses) {
  UseOrder order;
  run(order, 0, {3});
  run(order, 0, {});
  order.begin(0);
  EXPECT_EQ(order.next(9), std::vector<int>{3});
}

}  // namespace
}  // namespace smp::parameters
