#include "csrc/common/check.h"

#include <gtest/gtest.h>

#include <string>

namespace smp {
namespace {

class CheckTest : public ::testing::Test {
 protected:
  void TearDown() override { set_rank_prefix(""); }
};

template <typename Exception, typename Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const Exception& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST_F(CheckTest, PassingChecksThrowNothingAndDoNotEvaluateTheText) {
  int num_calls = 0;
  const auto count = [&] { return ++num_calls; };
  SMP_CHECK_VALUE(true, count());
  SMP_CHECK(1 < 2, count());
  SMP_ASSERT(true, count());
  EXPECT_EQ(num_calls, 0);
}

TEST_F(CheckTest, TextBeginsWithTheRankAndJoinsAllParts) {
  set_rank_prefix("[global_rank 5 | pp 1] ");
  const std::string text = message_of<ValueError>(
      [] { SMP_CHECK_VALUE(false, "expected ", 2, ", got ", 3.5, '!'); });
  EXPECT_EQ(text, "[global_rank 5 | pp 1] expected 2, got 3.5!");
}

TEST_F(CheckTest, EachMacroThrowsItsOwnKind) {
  EXPECT_THROW(SMP_CHECK_VALUE(false, "x"), ValueError);
  EXPECT_THROW(SMP_ASSERT(false, "x"), InternalError);
  try {
    SMP_CHECK(false, "x");
    FAIL() << "SMP_CHECK(false) did not throw";
  } catch (const ValueError&) {
    FAIL() << "a failure of the world is not the user's mistake";
  } catch (const Error&) {
  }
}

TEST_F(CheckTest, AssertNamesFileAndCondition) {
  const int num_left = 1;
  const std::string text = message_of<InternalError>(
      [&] { SMP_ASSERT(num_left == 0, "num_left ", num_left); });
  EXPECT_NE(text.find("check_test.cpp:"), std::string::npos) << text;
  EXPECT_NE(text.find("(num_left == 0) num_left 1"), std::string::npos) << text;
}

TEST_F(CheckTest, ChecksAreOneStatement) {
  bool reached_else = false;
  if (false)
    SMP_CHECK(false, "not taken");
  else
    reached_else = true;
  EXPECT_TRUE(reached_else);
}

}  // namespace
}  // namespace smp
