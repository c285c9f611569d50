#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "csrc/data_parallel/bucket_plan.h"

namespace smp::data_parallel {

/// The flat gradient tensor of one bucket, and how gradients get into it. Adds
/// in the order of the calls; knows nothing of microbatches or other ranks.
class FlatBucket {
 public:
  /// @param params  all parameters, by record index; views take their strides
  ///                where these are dense
  FlatBucket(const Bucket& plan, const std::vector<at::Tensor>& params);

  /// Adds a gradient. The first one of a step is copied, so that one single
  /// contribution stays bit for bit what autograd computed.
  void add(int slot_idx, const at::Tensor& grad);

  /// No gradient has come yet; the next one is the first.
  void reset();

  /// Ends a pass that is not reduced yet: divides by `divisor` and adds what
  /// earlier passes gave. The views then hold the sum of all passes so far.
  void keep_pass(double divisor);

  /// Makes the tensor ready for the sum over the ranks: the contributions over
  /// `pass_divisor`, plus earlier passes, over the divisor of the bucket.
  /// Parameters without a contribution are zero.
  void finish(double pass_divisor);

  /// The same scaling for a contribution that came after `finish`.
  void scale_late(at::Tensor& grad, double pass_divisor) const;

  /// Forgets what earlier passes gave to this slot, or to all.
  void drop_passes(int slot_idx);
  void drop_passes() { has_passes_ = false; }

  bool touched(int slot_idx) const { return touched_[slot_idx]; }
  const at::Tensor& flat() const { return flat_; }
  /// Gradient of one parameter as a view of the flat tensor.
  const at::Tensor& view(int slot_idx) const { return views_[slot_idx]; }

 private:
  void fill_untouched();

  double divisor_;
  std::vector<BucketSlot> slots_;
  at::Tensor flat_;
  std::vector<at::Tensor> views_;
  std::vector<bool> touched_;
  bool has_passes_ = false;
  at::Tensor passes_;  // sum of earlier passes; allocated when first needed
};

}  // namespace smp::data_parallel
