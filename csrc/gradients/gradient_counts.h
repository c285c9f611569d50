#pragma once

#include <map>
#include <vector>

namespace smp::gradients {

/// Counts the gradients that each parameter gets in a round, so that a bucket
/// can be reduced while backward goes on: once its parameters have got as many
/// as they got in earlier steps with as many microbatches. A gradient beyond
/// that number is late, also when the bucket has not been reduced by then:
/// timing never decides on the order of a sum. A *round* is a set of gradients
/// that are reduced together: those of a step, or of one of its microbatches.
///
/// A wrong guess about the first step has the same effect as a number that was
/// learnt. Ignores tensors and ranks; not thread-safe.
class GradientCounts {
 public:
  /// The expectation in a step that is the first of its kind.
  enum class Guess {
    kNothing,           ///< its buckets are whole at its end
    kOnePerMicrobatch,  ///< for each parameter
    kAsFirst,           ///< each microbatch as the first one, once that is over
  };
  /// The place of a gradient among those of its parameter in a round.
  enum class Place {
    kUnknown,  ///< nothing is expected
    kEarlier,  ///< others follow
    kLast,
    kLate,  ///< more than was expected
  };

  /// @param bucket_idxs  bucket of each parameter
  /// @param every_microbatch  whether a round is a microbatch instead of a step
  /// @param unguessed  parameters of which `guess` says nothing: their buckets
  ///     are whole at the end of the first step
  /// @param least  the least that is expected of a parameter once a step is
  ///     known: 0, or 1 where a gradient must not come late. Then a bucket with
  ///     a parameter that is not used is whole at the end of the step
  GradientCounts(std::vector<int> bucket_idxs, int num_buckets,
                 bool every_microbatch, Guess guess,
                 std::vector<int> unguessed = {}, int least = 0);
  GradientCounts(const GradientCounts&) = delete;  // it points into itself
  GradientCounts& operator=(const GradientCounts&) = delete;

  /// Begins a step, and its first round.
  void begin_step(int num_microbatches);
  void begin_round();
  /// Counts a gradient that was added.
  Place add(int param_idx);
  /// Ends microbatch 0, or the step, when only gradients of microbatch 0 were
  /// added.
  /// @return whether numbers are expected from now on and were not before
  bool expect_as_first();
  /// Ends the step. @param per_microbatch  see the member of that name
  void learn(const std::vector<int>& per_microbatch);

  /// Returns, by parameter, the number of gradients that each microbatch of
  /// this step will give; 0 where it is not known, or not the same in all of
  /// them.
  const std::vector<int>& per_microbatch() const { return per_microbatch_; }
  bool is_expecting() const { return expected_ != nullptr; }
  /// Returns whether the parameters of a bucket have got all gradients
  /// expected.
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
  const std::vector<int> unguessed_;
  const int least_;

  std::map<int, Learned> learned_;  // by number of microbatches
  // State of this step.
  int num_microbatches_ = 0;
  std::vector<int> per_microbatch_;
  std::vector<int> guessed_;
  bool awaits_first_ = false;  // the guess is made after microbatch 0
  const std::vector<int>* expected_ = nullptr;  // learnt or guessed, if any
  std::vector<int> most_added_;                 // in one of its rounds
  // State of this round.
  std::vector<int> num_added_;
  std::vector<int> num_missing_;  // by bucket: parameters not yet complete
};

}  // namespace smp::gradients
