#pragma once

#include <ATen/core/Tensor.h>

#include "csrc/comm/communicator.h"

namespace smp::gradients {

/// The reduction of one bucket, from the gradients of this rank to the sum over
/// the ranks. It is the part that the reducer sees, whether the bucket is kept
/// whole or in shards. Ignores microbatches. A round is a set of gradients that
/// are reduced together: those of a step, or of one microbatch. Not
/// thread-safe, never waits.
class BucketReduction {
 public:
  virtual ~BucketReduction() = default;

  /// Frees the previous sum, which is not needed any more; `result` may be
  /// undefined until the next sum.
  virtual void release() = 0;

  /// Begins a round without gradients.
  virtual void begin_round() = 0;
  /// Returns whether it has memory for gradients; otherwise the next gradient
  /// takes some.
  virtual bool has_memory() const = 0;
  virtual void add(int slot_idx, const at::Tensor& grad) = 0;
  /// Adds the last gradient of this slot in this round. `launch` follows with
  /// the same divisor: the sum of the slot may be divided already.
  virtual void add_last(int slot_idx, const at::Tensor& grad,
                        double pass_divisor) = 0;

  /// Divides the sums by `pass_divisor` and by the divisor of the bucket, and
  /// begins the sum over `first_group`. Nothing more may be added in this
  /// round.
  virtual void launch(double pass_divisor) = 0;
  /// Begins a sum that follows the first one, `hop_idx` = 0, 1, ...
  /// @return false when there is no such operation
  virtual bool launch_hop(int hop_idx) = 0;
  /// Returns the operation in flight, or null, and the ranks that take part in
  /// it.
  virtual const comm::WorkPtr& work() const = 0;
  virtual const comm::Communicator& group() const = 0;
  /// Ends the operation in flight, which is over and has been waited for.
  virtual void settle() = 0;

  /// Ends a round that is not reduced: keeps its sum of this rank.
  virtual void keep_pass(double pass_divisor) = 0;
  /// Forgets what earlier passes gave to this slot, or to all slots.
  virtual void drop_passes(int slot_idx) = 0;
  virtual void drop_passes() = 0;

  /// Adds a sum over `first_group` of gradients that came in a second round.
  /// @param sum  shaped like the parameter, divided already
  virtual void add_late(int slot_idx, const at::Tensor& sum) = 0;

  /// Ends a step that failed. Operations in flight may still write to their
  /// memory.
  virtual void abandon() = 0;

  /// Returns all gradients of this bucket that stay between steps; see
  /// `release`.
  virtual const at::Tensor& result() const = 0;
  /// Returns the part of the result that becomes `.grad` of a target.
  virtual at::Tensor gradient(int slot_idx, const at::Tensor& target) const = 0;
};

}  // namespace smp::gradients
