#pragma once

#include <map>
#include <vector>

namespace smp::gradients {

/// How many gradients each parameter gets in a round, so that a bucket can be
/// reduced while backward goes on: once its parameters have got as many as they
/// got in earlier steps with as many microbatches. What comes beyond that
/// number is late, also when the bucket has not been reduced by then: timing
/// never decides on the order of a sum. A *round* is what is reduced together:
/// a step, or one of its microbatches.
///
/// A wrong guess about the first step is as a number that was learnt. Knows
/// nothing of tensors and ranks; not thread-safe.
class GradientCounts {
 public:
  /// What is expected of a step that is the first of its kind.
  enum class Guess {
    kNothing,           ///< its buckets are whole at its end
    kOnePerMicrobatch,  ///< for each parameter
    kAsFirst,           ///< each microbatch as the first one, once that is over
  };
  /// What a gradient is among those of its parameter in a round.
  enum class Place {
    kUnknown,  ///< nothing is expected
    kEarlier,  ///< others follow
    kLast,
    kLate,  ///< more than was expected
  };

  /// @param bucket_idxs  of each parameter
  /// @param every_microbatch  is a round, else a step is one
  GradientCounts(std::vector<int> bucket_idxs, int num_buckets,
                 bool every_microbatch, Guess guess);
  GradientCounts(const GradientCounts&) = delete;  // it points into itself
  GradientCounts& operator=(const GradientCounts&) = delete;

  /// A step begins, and its first round.
  void begin_step(int num_microbatches);
  void begin_round();
  /// A gradient was added.
  Place add(int param_idx);
  /// Microbatch 0 is over, or the step, and only its gradients were added.
  /// @return whether numbers are expected from now on and were not before
  bool expect_as_first();
  /// The step is over. @param per_microbatch  see there
  void learn(const std::vector<int>& per_microbatch);

  /// By parameter: how many each microbatch of this step will give; 0 where
  /// that is not known, or not the same in all of them.
  const std::vector<int>& per_microbatch() const { return per_microbatch_; }
  bool is_expecting() const { return expected_ != nullptr; }
  /// Whether the parameters of a bucket have got what was expected.
  bool is_complete(int bucket_idx) const {
    return is_expecting() && num_missing_[bucket_idx] == 0;
  }

 private:
  struct Learned {
    std::vector<int> most;  // of a round
    std::vector<int> per_microbatch;
  };

  void count_missing();

  const std::vector<int> bucket_idxs_;
  const int num_buckets_;
  const bool every_microbatch_;
  const Guess guess_;

  std::map<int, Learned> learned_;  // by number of microbatches
  // Of this step.
  int num_microbatches_ = 0;
  std::vector<int> per_microbatch_;
  std::vector<int> guessed_;
  bool awaits_first_ = false;  // the guess is made after microbatch 0
  const std::vector<int>* expected_ = nullptr;  // learnt or guessed, if any
  std::vector<int> most_added_;                 // in one of its rounds
  // Of this round.
  std::vector<int> num_added_;
  std::vector<int> num_missing_;  // by bucket: parameters not yet complete
};

}  // namespace smp::gradients
