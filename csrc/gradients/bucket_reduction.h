#pragma once

#include <ATen/core/Tensor.h>

#include "csrc/comm/communicator.h"

namespace smp::gradients {

/// The way of one bucket from the gradients of this rank to the sum over the
/// ranks; what the reducer needs to know of it, whether it is kept whole or in
/// shards. Knows nothing of microbatches. A round is what is reduced together:
/// the gradients of a step, or of one microbatch. Not thread-safe, never waits.
class BucketReduction {
 public:
  virtual ~BucketReduction() = default;

  /// What was reduced before is not needed here any more; `result` may be
  /// undefined until the next sum.
  virtual void let_go() = 0;

  /// No gradient has come yet.
  virtual void begin_round() = 0;
  /// Has it memory for gradients, or would the next one take some?
  virtual bool has_memory() const = 0;
  virtual void add(int slot_idx, const at::Tensor& grad) = 0;
  /// The last one of this slot in this round, which `launch` follows with the
  /// same divisor: may divide its sum now, while it is at it.
  virtual void add_last(int slot_idx, const at::Tensor& grad,
                        double pass_divisor) = 0;

  /// Divides what came by `pass_divisor` and by that of the bucket, and begins
  /// its sum over `first_group`. Nothing more may be added in this round.
  virtual void launch(double pass_divisor) = 0;
  /// Begins what follows the first sum, `hop_idx` = 0, 1, ...
  /// @return false when there is no such operation
  virtual bool launch_hop(int hop_idx) = 0;
  /// The operation that is in flight, or null, and over which ranks it goes.
  virtual const comm::WorkPtr& work() const = 0;
  virtual const comm::Communicator& group() const = 0;
  /// The operation in flight is over, and somebody has waited for it.
  virtual void settle() = 0;

  /// A round that is not reduced is over: keeps its sum of this rank.
  virtual void keep_pass(double pass_divisor) = 0;
  /// Forgets what earlier passes gave to this slot, or to all.
  virtual void drop_passes(int slot_idx) = 0;
  virtual void drop_passes() = 0;

  /// Adds a sum over `first_group` that came in a second round.
  /// @param sum  like the parameter, divided already
  virtual void add_late(int slot_idx, const at::Tensor& sum) = 0;

  /// The step failed. Operations in flight may still write to their memory.
  virtual void abandon() = 0;

  /// All gradients of this bucket that stay between steps; see `let_go`.
  virtual const at::Tensor& result() const = 0;
  /// The part of it that becomes `.grad` of a target.
  virtual at::Tensor gradient(int slot_idx, const at::Tensor& target) const = 0;
};

}  // namespace smp::gradients
