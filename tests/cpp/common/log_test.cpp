#include "csrc/common/log.h"

#include <gtest/gtest.h>

#include <string>

namespace smp {
namespace {

class LogTest : public ::testing::Test {
 protected:
  void TearDown() override {
    set_log_level(LogLevel::kWarning);
    set_rank_prefix("");
  }

  template <typename Function>
  static std::string printed(Function function) {
    ::testing::internal::CaptureStderr();
    function();
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, LinesCarryRankAndLevel) {
  set_rank_prefix("[global_rank 2 | pp 1] ");
  EXPECT_EQ(printed([] { SMP_LOG(kWarning, "free ", 3, " MB"); }),
            "[global_rank 2 | pp 1] smp warning: free 3 MB\n");
}

TEST_F(LogTest, LevelsBelowTheSetOneAreSilentAndCostNothing) {
  int num_calls = 0;
  const auto count = [&] { return ++num_calls; };
  EXPECT_EQ(printed([&] { SMP_LOG(kInfo, count()); }), "");
  EXPECT_EQ(num_calls, 0);
  set_log_level(LogLevel::kInfo);
  EXPECT_EQ(printed([&] { SMP_LOG(kInfo, count()); }), "smp info: 1\n");
  EXPECT_EQ(printed([&] { SMP_LOG(kDebug, count()); }), "");
}

TEST_F(LogTest, OffSilencesErrorsToo) {
  set_log_level(LogLevel::kOff);
  EXPECT_EQ(printed([] { SMP_LOG(kError, "x"); }), "");
}

}  // namespace
}  // namespace smp
