// A reducer whose buckets are applied during backward, as soon as each is
// summed.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cpp/gradients/reducer_fixture.h"

namespace smp::gradients {
namespace {

const std::vector<std::vector<int64_t>> kShapes = {{128}, {128}, {128}, {128}};

// Notes the gradients that exist whenever a bucket is applied.
struct Applied {
  explicit Applied(comm::CommunicatorPtr dp)
      : rank(kShapes, std::move(dp), options()) {}

  Reducer::Options options() {
    Reducer::Options made = small_buckets();
    made.apply = [this](int bucket_idx) {
      seen.push_back(std::to_string(bucket_idx) + ":");
      for (int i = 0; i < 4; ++i) {
        if (!rank.has_grad(i)) continue;
        seen.back() += " p" + std::to_string(i) + "=" +
                       std::to_string(static_cast<int>(rank.grad(i)));
      }
    };
    return made;
  }
  int64_t bytes() const { return rank.reducer->stats().flat_bytes; }

  std::vector<std::string> seen;
  Rank rank;
};

TEST(AppliedReducerTest, each_bucket_is_applied_when_its_gradient_has_come) {
  Applied applied(nullptr);
  for (int step = 0; step < 2; ++step) {
    applied.seen.clear();
    applied.rank.reducer->begin_step(1);
    applied.rank.contribute(3, 0, 3);
    EXPECT_EQ(applied.seen, (std::vector<std::string>{"0: p3=3"}));
    EXPECT_FALSE(applied.rank.has_grad(3));
    applied.rank.contribute(2, 0, 4);
    applied.rank.contribute(0, 0, 6);  // waits, since the order is that of all
    EXPECT_EQ(applied.seen.size(), 2U);
    EXPECT_EQ(applied.bytes(), 512) << "that of applied buckets serves p0";
    applied.rank.reducer->end_step();
    EXPECT_EQ(applied.seen,
              (std::vector<std::string>{"0: p3=3", "1: p2=4", "2:", "3: p0=6"}))
        << "a parameter that was not used has no gradient";
    EXPECT_EQ(applied.bytes(), 0);
  }
  EXPECT_LE(applied.rank.reducer->stats().peak_flat_bytes, 2 * 512);
}

TEST(AppliedReducerTest,
     ranks_apply_sums_and_agree_on_parameters_that_are_used) {
  comm::run_ranks(2, [](int own, const comm::CommunicatorPtr& dp) {
    Applied applied(dp);
    for (int step = 0; step < 3; ++step) {
      applied.seen.clear();
      applied.rank.reducer->begin_step(1);
      for (int i = 3; i >= 0; --i) {
        const bool is_used = i == 2 ? own == 1 : i != 1;
        if (is_used) applied.rank.contribute(i, 0, 4 * (i + own));
      }
      applied.rank.reducer->end_step();
      EXPECT_EQ(applied.seen, (std::vector<std::string>{"0: p3=14", "1: p2=6",
                                                        "2:", "3: p0=2"}));
    }
    EXPECT_GT(applied.rank.reducer->stats().num_early_buckets, 0);
  });
}

TEST(AppliedReducerTest, a_gradient_after_the_update_is_an_error) {
  Applied applied(nullptr);
  applied.rank.reducer->begin_step(1);
  applied.rank.contribute(3, 0, 3);
  try {
    applied.rank.contribute(3, 0, 3);
    FAIL() << "expected an error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("p3 got a gradient after its upd"),
              std::string::npos)
        << error.what();
  }
  applied.rank.reducer->cancel_step();
  EXPECT_EQ(applied.bytes(), 0);
}

TEST(AppliedReducerTest, several_microbatches_are_refused) {
  Applied applied(nullptr);
  EXPECT_THROW(applied.rank.reducer->begin_step(2), ValueError);
}

}  // namespace
}  // namespace smp::gradients
