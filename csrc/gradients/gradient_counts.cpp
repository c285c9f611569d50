#include "csrc/gradients/gradient_counts.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace smp::gradients {

GradientCounts::GradientCounts(std::vector<int> bucket_idxs, int num_buckets,
                               bool every_microbatch, Guess guess,
                               std::vector<int> unguessed, int least)
    : bucket_idxs_(std::move(bucket_idxs)),
      num_buckets_(num_buckets),
      every_microbatch_(every_microbatch),
      guess_(guess),
      unguessed_(std::move(unguessed)),
      least_(least) {}

void GradientCounts::begin_step(int num_microbatches) {
  const size_t num_params = bucket_idxs_.size();
  num_microbatches_ = num_microbatches;
  most_added_.assign(num_params, 0);
  expected_ = nullptr;
  awaits_first_ = false;
  if (const auto found = learned_.find(num_microbatches);
      found != learned_.end()) {
    expected_ = &found->second.most;
    per_microbatch_ = found->second.per_microbatch;
  } else {
    per_microbatch_.assign(num_params, 0);
    awaits_first_ = guess_ == Guess::kAsFirst;
    if (guess_ == Guess::kOnePerMicrobatch) {
      guessed_.assign(num_params, every_microbatch_ ? 1 : num_microbatches);
      for (const int param_idx : unguessed_) {
        guessed_[param_idx] = std::numeric_limits<int>::max();
      }
      expected_ = &guessed_;
    }
  }
  begin_round();
}

void GradientCounts::begin_round() {
  num_added_.assign(bucket_idxs_.size(), 0);
  num_missing_.assign(num_buckets_, 0);
  count_missing();
}

void GradientCounts::count_missing() {
  if (!is_expecting()) return;
  for (size_t i = 0; i < bucket_idxs_.size(); ++i) {
    if (num_added_[i] < (*expected_)[i]) ++num_missing_[bucket_idxs_[i]];
  }
}

GradientCounts::Place GradientCounts::add(int param_idx) {
  const int num_added = ++num_added_[param_idx];
  most_added_[param_idx] = std::max(most_added_[param_idx], num_added);
  if (!is_expecting()) return Place::kUnknown;
  const int num_expected = (*expected_)[param_idx];
  if (num_added != num_expected) {
    return num_added < num_expected ? Place::kEarlier : Place::kLate;
  }
  --num_missing_[bucket_idxs_[param_idx]];
  return Place::kLast;
}

// Expects that all microbatches are like the first one. So far only gradients
// of the first one were added, because gradients of later ones wait until it is
// finished: when this happens depends on timing, but the expectation does not.
bool GradientCounts::expect_as_first() {
  if (!std::exchange(awaits_first_, false)) return false;
  guessed_ = num_added_;
  if (!every_microbatch_) {
    for (int& count : guessed_) count *= num_microbatches_;
  }
  expected_ = &guessed_;
  count_missing();
  return true;
}

// Stores the largest number of gradients that a parameter has got in such a
// round: one with fewer is reduced at its end, one with more in a second round.
// Also stores the number from each microbatch, where it was the same at all
// times.
void GradientCounts::learn(const std::vector<int>& per_microbatch) {
  const auto [found, is_new] = learned_.try_emplace(num_microbatches_);
  Learned& learned = found->second;
  if (is_new) learned = {most_added_, per_microbatch};
  for (size_t i = 0; i < bucket_idxs_.size(); ++i) {
    learned.most[i] = std::max({learned.most[i], most_added_[i], least_});
    if (learned.per_microbatch[i] != per_microbatch[i]) {
      learned.per_microbatch[i] = 0;
    }
  }
}

}  // namespace smp::gradients
