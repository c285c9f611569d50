#include "csrc/common/env.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "csrc/common/check.h"

namespace smp {
namespace {

constexpr const char* kName = "SMP_ENV_TEST";

class EnvTest : public ::testing::Test {
 protected:
  void TearDown() override { ::unsetenv(kName); }
  static void set(const char* value) { ::setenv(kName, value, 1); }
};

TEST_F(EnvTest, UnsetAndEmptyGiveTheFallback) {
  for (const bool empty : {false, true}) {
    if (empty) set("");
    EXPECT_FALSE(env_string(kName).has_value());
    EXPECT_EQ(env_int(kName, 7, 0, 9), 7);
    EXPECT_EQ(env_number(kName, 1.5), 1.5);
    EXPECT_TRUE(env_flag(kName, true));
    EXPECT_FALSE(env_flag(kName, false));
  }
}

TEST_F(EnvTest, IntegersAreReadInTheirBounds) {
  set("-3");
  EXPECT_EQ(env_int(kName, 0, -3, 3), -3);
  EXPECT_THROW(env_int(kName, 0, -2, 3), ValueError);
  for (const char* bad :
       {"4", "3x", "x", " 3", "1.0", "99999999999999999999"}) {
    set(bad);
    EXPECT_THROW(env_int(kName, 0, -3, 3), ValueError) << bad;
  }
}

TEST_F(EnvTest, NumbersAreFiniteAndNotNegative) {
  set("2.5");
  EXPECT_EQ(env_number(kName, 0), 2.5);
  set("1e-3");
  EXPECT_EQ(env_number(kName, 0), 1e-3);
  for (const char* bad : {"-1", "nan", "inf", "5s", "five"}) {
    set(bad);
    EXPECT_THROW(env_number(kName, 0), ValueError) << bad;
  }
}

TEST_F(EnvTest, FlagsKnowTheUsualWords) {
  for (const char* word : {"1", "true", "ON", "Yes"}) {
    set(word);
    EXPECT_TRUE(env_flag(kName, false)) << word;
  }
  for (const char* word : {"0", "False", "off", "NO"}) {
    set(word);
    EXPECT_FALSE(env_flag(kName, true)) << word;
  }
}

TEST_F(EnvTest, ErrorsNameVariableAndValue) {
  set("maybe");
  try {
    env_flag(kName, false);
    FAIL() << "'maybe' is no flag";
  } catch (const ValueError& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find(kName), std::string::npos) << text;
    EXPECT_NE(text.find("'maybe'"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace smp
