#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "csrc/gradients/shard_layout.h"

namespace smp::gradients {

/// The gradients that this rank gives to one bucket, in a flat tensor of the
/// accumulation dtype. Adds in the order of the calls; knows nothing of
/// microbatches or other ranks. Has memory only while it is attached.
class FlatBucket {
 public:
  /// @param like  all parameters, by record index; views take their sizes, and
  ///              their strides where these are dense
  FlatBucket(const ShardedBucket& plan, const std::vector<at::Tensor>& like);

  /// Takes memory of `flat_numel` elements with any content.
  void attach(at::Tensor flat);
  /// Gives it back.
  at::Tensor detach();
  bool is_attached() const { return flat_.defined(); }

  /// Adds a gradient, also one of a narrower dtype. The first one since `reset`
  /// is copied, so that one single contribution stays bit for bit what autograd
  /// computed.
  /// @param divisor  not 1: it is the last one of the slot, and its sum is
  ///                 divided, if possible without a further pass over memory
  void add(int slot_idx, const at::Tensor& grad, double divisor = 1);

  /// No gradient has come yet; the next one is the first.
  void reset();

  /// Parameters without a contribution become zero; what is not divided yet is
  /// divided.
  void finish(double divisor);

  const at::Tensor& flat() const { return flat_; }
  /// A parameter that lies in one segment, as a view of the flat tensor.
  at::Tensor view(int slot_idx) const;

 private:
  enum class SlotState { kEmpty, kSum, kDivided };
  struct Slot {
    at::Tensor like;
    std::vector<Segment> segments;
    SlotState state = SlotState::kEmpty;
  };

  std::vector<Slot> slots_;
  std::vector<Segment> gaps_;  // padding, by `flat_offset` and `numel`
  at::Tensor flat_;
};

}  // namespace smp::gradients
