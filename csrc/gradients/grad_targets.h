#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "csrc/gradients/bucket_table.h"

namespace smp::gradients {

/// `.grad` of what a reducer updates, over the passes of one reduction: what
/// was there before, which comes back when a step fails and is added
/// afterwards, and which parameters have got something since. A parameter that
/// no rank used keeps its `.grad` (or None). Belongs to the mutex of its
/// reducer.
class GradTargets {
 public:
  /// The arguments outlive this.
  GradTargets(const ReducedParameters& parameters, const BucketTable& buckets)
      : targets_(parameters.targets),
        buckets_(buckets),
        old_(targets_.size()),
        used_(targets_.size(), false) {}

  /// A pass begins. @param is_first  of its reduction
  void begin_pass(bool is_first);
  void note_gradient(int param_idx) { used_[param_idx] = true; }
  /// By parameter: a gradient has come, here or as set by `publish_sums`.
  const std::vector<bool>& used() const { return used_; }

  /// `.grad` becomes the sum over ranks, and what was there is added.
  /// @param used  by parameter: on some rank
  /// @param goes_on  a shard has further passes, and must not have it twice
  void publish_sums(std::vector<bool> used, bool goes_on);
  /// The same of the sum so far of this rank, which is not reduced.
  void publish_own() { publish(false); }
  /// The next pass begins another reduction.
  void forget_old();
  /// The step has failed: what was there before comes back.
  void restore();

 private:
  void publish(bool goes_on);

  const std::vector<at::Tensor>& targets_;
  const BucketTable& buckets_;
  std::vector<at::Tensor> old_;  // `.grad` from before; may be undefined
  std::vector<bool> used_;
};

}  // namespace smp::gradients
