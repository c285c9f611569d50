#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "csrc/gradients/bucket_table.h"

namespace smp::gradients {

/// The `.grad` of a reducer's targets, over the passes of one reduction. Holds
/// the earlier `.grad`, which comes back when a step fails and is added
/// afterwards, and the parameters that have got a gradient since. A parameter
/// that no rank used keeps its `.grad` (or None). Guarded by the mutex of its
/// reducer.
class GradTargets {
 public:
  /// The arguments must outlive this object.
  GradTargets(const ReducedParameters& parameters, const BucketTable& buckets)
      : targets_(parameters.targets),
        buckets_(buckets),
        old_(targets_.size()),
        used_(targets_.size(), false) {}

  /// Begins a pass. @param is_first  whether it is the first of its reduction
  void begin_pass(bool is_first);
  void note_gradient(int param_idx) { used_[param_idx] = true; }
  /// Returns, by parameter, whether a gradient has come here, or what
  /// `publish_sums` has set.
  const std::vector<bool>& used() const { return used_; }

  /// Sets `.grad` to the sum over ranks plus the earlier `.grad`.
  /// @param used  by parameter: whether some rank used it
  /// @param goes_on  true for a shard with further passes, which must not have
  ///     the earlier `.grad` twice
  void publish_sums(std::vector<bool> used, bool goes_on);
  /// Sets `.grad` likewise from the sum so far of this rank, which is not
  /// reduced.
  void publish_own() { publish(false); }
  /// Sets `.grad` likewise of the parameters of one bucket, whose sum has come.
  /// @param used  by slot: whether some rank used the parameter
  void publish_bucket(int bucket_idx, const std::vector<bool>& used);
  /// Drops `.grad` of the parameters of a bucket.
  void drop_bucket(int bucket_idx);
  /// Forgets the earlier `.grad`: the next pass begins another reduction.
  void forget_old();
  /// Restores the earlier `.grad` after a step that failed.
  void restore();

 private:
  void publish(bool goes_on);
  void publish_one(int param_idx, bool goes_on);

  const std::vector<at::Tensor>& targets_;
  const BucketTable& buckets_;
  std::vector<at::Tensor> old_;  // `.grad` from before; may be undefined
  std::vector<bool> used_;
};

}  // namespace smp::gradients
