#include "csrc/gradients/gradient_counts.h"

#include <gtest/gtest.h>

#include <vector>

namespace smp::gradients {
namespace {

using Guess = GradientCounts::Guess;
using Place = GradientCounts::Place;

constexpr bool kEveryMicrobatch = true;
constexpr bool kEveryStep = false;

// Parameters 0 and 1 in bucket 0, parameter 2 in bucket 1.
GradientCounts make(Guess guess, bool every_microbatch = kEveryStep) {
  return {{0, 0, 1}, 2, every_microbatch, guess};
}

std::vector<Place> add(GradientCounts& counts,
                       const std::vector<int>& param_idxs) {
  std::vector<Place> places;
  for (const int i : param_idxs) places.push_back(counts.add(i));
  return places;
}

std::vector<bool> complete(const GradientCounts& counts) {
  return {counts.is_complete(0), counts.is_complete(1)};
}

TEST(GradientCountsTest, without_a_guess_the_first_step_expects_nothing) {
  GradientCounts counts = make(Guess::kNothing);
  counts.begin_step(2);
  EXPECT_FALSE(counts.is_expecting());
  EXPECT_EQ(add(counts, {0, 0, 1}), (std::vector<Place>(3, Place::kUnknown)));
  EXPECT_FALSE(counts.expect_as_first());
  EXPECT_EQ(complete(counts), (std::vector<bool>{false, false}));
  EXPECT_EQ(counts.per_microbatch(), (std::vector<int>{0, 0, 0}));
}

TEST(GradientCountsTest, a_bucket_is_complete_with_what_was_learnt) {
  GradientCounts counts = make(Guess::kNothing);
  counts.begin_step(2);
  add(counts, {0, 0, 1});
  counts.learn({1, 0, 0});
  counts.begin_step(2);
  EXPECT_EQ(counts.per_microbatch(), (std::vector<int>{1, 0, 0}));
  // Parameter 2 got none, so nothing is awaited for its bucket.
  EXPECT_EQ(complete(counts), (std::vector<bool>{false, true}));
  EXPECT_EQ(add(counts, {0, 1}),
            (std::vector<Place>{Place::kEarlier, Place::kLast}));
  EXPECT_EQ(complete(counts), (std::vector<bool>{false, true}));
  EXPECT_EQ(add(counts, {0}), (std::vector<Place>{Place::kLast}));
  EXPECT_EQ(complete(counts), (std::vector<bool>{true, true}));
  EXPECT_EQ(add(counts, {0, 2}),
            (std::vector<Place>{Place::kLate, Place::kLate}));
  EXPECT_EQ(complete(counts), (std::vector<bool>{true, true}));
}

TEST(GradientCountsTest, the_most_counts_and_unequal_microbatches_count_none) {
  GradientCounts counts = make(Guess::kNothing);
  counts.begin_step(1);
  add(counts, {0, 0, 1});
  counts.learn({2, 1, 0});
  counts.begin_step(1);
  add(counts, {0, 1, 1});
  counts.learn({1, 2, 0});
  counts.begin_step(1);
  EXPECT_EQ(counts.per_microbatch(), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(add(counts, {0, 0, 1, 1}),
            (std::vector<Place>{Place::kEarlier, Place::kLast, Place::kEarlier,
                                Place::kLast}));
}

TEST(GradientCountsTest, numbers_of_microbatches_are_learnt_apart) {
  GradientCounts counts = make(Guess::kNothing);
  counts.begin_step(1);
  add(counts, {0});
  counts.learn({1, 0, 0});
  counts.begin_step(2);
  EXPECT_FALSE(counts.is_expecting());
  counts.begin_step(1);
  EXPECT_TRUE(counts.is_expecting());
}

TEST(GradientCountsTest, a_step_that_is_not_learnt_leaves_nothing) {
  GradientCounts counts = make(Guess::kNothing);
  counts.begin_step(1);
  add(counts, {0});
  counts.begin_step(1);
  EXPECT_FALSE(counts.is_expecting());
  add(counts, {1});
  counts.learn({0, 1, 0});
  counts.begin_step(1);
  EXPECT_EQ(counts.add(0), Place::kLate) << "of the step that was forgotten";
}

TEST(GradientCountsTest, shared_parameters_are_counted_before_they_complete) {
  GradientCounts counts({0, 0, 1}, 2, kEveryStep, Guess::kOnePerMicrobatch, {1},
                        /*least=*/1);
  counts.begin_step(1);
  EXPECT_EQ(add(counts, {0, 1, 2}),
            (std::vector<Place>{Place::kLast, Place::kEarlier, Place::kLast}));
  EXPECT_EQ(add(counts, {1}), (std::vector<Place>{Place::kEarlier}));
  EXPECT_EQ(complete(counts), (std::vector<bool>{false, true}));
  counts.learn({1, 2, 1});
  counts.begin_step(1);
  EXPECT_EQ(add(counts, {0, 1, 1}),
            (std::vector<Place>{Place::kLast, Place::kEarlier, Place::kLast}));
  EXPECT_EQ(complete(counts), (std::vector<bool>{true, false}));
}

TEST(GradientCountsTest, a_parameter_without_gradients_may_be_waited_for) {
  for (const int least : {0, 1}) {
    GradientCounts counts({0, 0, 1}, 2, kEveryStep, Guess::kNothing, {}, least);
    counts.begin_step(1);
    add(counts, {0, 1});
    counts.learn({1, 1, 0});
    counts.begin_step(1);
    EXPECT_EQ(complete(counts), (std::vector<bool>{false, least == 0}));
    EXPECT_EQ(counts.add(2), least == 0 ? Place::kLate : Place::kLast);
  }
}

TEST(GradientCountsTest, one_per_microbatch_is_a_guess_about_a_round) {
  GradientCounts step = make(Guess::kOnePerMicrobatch);
  step.begin_step(2);
  EXPECT_EQ(add(step, {2, 2, 2}),
            (std::vector<Place>{Place::kEarlier, Place::kLast, Place::kLate}));
  EXPECT_EQ(complete(step), (std::vector<bool>{false, true}));
  GradientCounts microbatch = make(Guess::kOnePerMicrobatch, kEveryMicrobatch);
  microbatch.begin_step(2);
  EXPECT_EQ(microbatch.add(2), Place::kLast);
  microbatch.begin_round();
  EXPECT_EQ(complete(microbatch), (std::vector<bool>{false, false}));
  EXPECT_EQ(microbatch.add(2), Place::kLast);
}

TEST(GradientCountsTest, the_first_microbatch_stands_for_those_that_follow) {
  GradientCounts counts = make(Guess::kAsFirst);
  counts.begin_step(3);
  EXPECT_EQ(add(counts, {0, 0, 1}), (std::vector<Place>(3, Place::kUnknown)));
  EXPECT_FALSE(counts.is_expecting());
  EXPECT_TRUE(counts.expect_as_first());
  EXPECT_FALSE(counts.expect_as_first()) << "once in a step";
  EXPECT_EQ(complete(counts), (std::vector<bool>{false, true}));
  EXPECT_EQ(add(counts, {1, 1}),
            (std::vector<Place>{Place::kEarlier, Place::kLast}));
  EXPECT_EQ(add(counts, {0, 0, 0}), (std::vector<Place>(3, Place::kEarlier)));
  EXPECT_EQ(complete(counts), (std::vector<bool>{false, true}));
  EXPECT_EQ(counts.add(0), Place::kLast);
  EXPECT_EQ(complete(counts), (std::vector<bool>{true, true}));
  EXPECT_EQ(counts.add(2), Place::kLate);
}

TEST(GradientCountsTest, a_round_of_one_microbatch_is_as_the_first_one) {
  GradientCounts counts = make(Guess::kAsFirst, kEveryMicrobatch);
  counts.begin_step(3);
  add(counts, {0, 0});
  EXPECT_TRUE(counts.expect_as_first());
  EXPECT_EQ(complete(counts), (std::vector<bool>{true, true}));
  counts.begin_round();
  EXPECT_EQ(complete(counts), (std::vector<bool>{false, true}));
  EXPECT_EQ(add(counts, {0, 0}),
            (std::vector<Place>{Place::kEarlier, Place::kLast}));
  counts.learn({2, 0, 0});
  counts.begin_step(3);
  EXPECT_FALSE(counts.expect_as_first()) << "it has been learnt";
}

}  // namespace
}  // namespace smp::gradients
