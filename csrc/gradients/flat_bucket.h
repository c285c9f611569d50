#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "csrc/gradients/shard_layout.h"

namespace smp::gradients {

/// The gradients that this rank gives to one bucket, in a flat tensor of the
/// accumulation dtype. Adds in the order of the calls; ignores microbatches and
/// other ranks. Has memory only while it is attached.
class FlatBucket {
 public:
  /// @param like  all parameters, by record index; views take their sizes, and
  ///     their strides where these are dense
  FlatBucket(const ShardedBucket& plan, const std::vector<at::Tensor>& like);

  /// Takes memory of `flat_numel` elements with any content.
  void attach(at::Tensor flat);
  /// Gives the memory back.
  at::Tensor detach();
  bool is_attached() const { return flat_.defined(); }

  /// Adds a gradient, also of a narrower dtype. The first gradient since
  /// `reset` is copied, so that a single contribution stays bit for bit what
  /// autograd computed.
  /// @param divisor  not 1 for the last gradient of the slot, whose sum is then
  ///     divided, if possible without a further pass over memory
  void add(int slot_idx, const at::Tensor& grad, double divisor = 1);

  /// Forgets all gradients; the next gradient is the first.
  void reset();

  /// Sets parameters without a contribution to zero, and divides what is not
  /// divided yet.
  void finish(double divisor);

  const at::Tensor& flat() const { return flat_; }
  /// Returns a parameter that lies in one segment, as a view of the flat
  /// tensor.
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
