#include "csrc/common/log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace smp {
namespace {

class LogTest : public ::testing::Test {
 protected:
  void TearDown() override {
    set_log_level(LogLevel::kWarning);
    set_rank_prefix("");
    set_details_file("");
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

TEST_F(LogTest, DetailsGoToAFileThatTheLineNames) {
  const std::string path = std::filesystem::temp_directory_path() /
                           ("smp-details-" + std::to_string(::getpid()));
  const std::string text = "stacks of all ranks:\n  one\n  two";
  EXPECT_EQ(printed([&] { log_details(LogLevel::kWarning, text); }),
            "smp warning: " + text + "\n");
  set_rank_prefix("[global_rank 0] ");
  set_details_file(path);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(
        printed([&] { log_details(LogLevel::kWarning, text); }),
        "[global_rank 0] smp warning: stacks of all ranks: " + path + "\n");
  }
  std::stringstream content;
  content << std::ifstream(path).rdbuf();
  std::filesystem::remove(path);
  const std::string section = "==== [global_rank 0] " + text + "\n";
  EXPECT_EQ(content.str(), section + section);
}

TEST_F(LogTest, DetailsAreLoggedWhereTheFileCannotBeWritten) {
  set_details_file("/no/such/folder/details");
  EXPECT_EQ(printed([] { log_details(LogLevel::kWarning, "a\nb"); }),
            "smp warning: a\nb\n");
}

}  // namespace
}  // namespace smp
