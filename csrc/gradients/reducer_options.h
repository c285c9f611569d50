#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "csrc/comm/group_wait.h"
#include "csrc/gradients/shard_reduction.h"

namespace smp::gradients {

/// Settings of a `Reducer`.
struct ReducerOptions {
  int64_t bucket_cap_bytes = int64_t{25} << 20;
  /// True: reduce during backward. False: reduce at the end of the step.
  bool overlap = true;
  /// True: divide by the number of microbatches.
  bool average_over_microbatches = true;
  /// Number of batches whose losses are averaged: one for each replica that
  /// reads a batch. Any further divisor of a record is its own `divisor`.
  double num_batches = 1;
  /// Steps whose gradients are added up before they are reduced, once. After
  /// the others `.grad` holds the sum so far of this rank alone (sharded: of
  /// its shard group). Setting `.grad` to None in between forgets that sum.
  int passes_per_reduction = 1;
  /// True if a microbatch gives one gradient to each parameter that it uses, as
  /// far as is known before the first step. False in a pipeline, where each
  /// remote call of a module gives a gradient.
  bool expects_one_per_microbatch = true;
  std::optional<Sharding> sharding;  ///< none: every rank keeps all
  /// Uses up `.grad` of the targets of a bucket, which are dropped afterwards
  /// with the memory of the bucket. Called during backward as soon as the
  /// bucket has been summed, without a lock. Null: `.grad` stays until the next
  /// step.
  std::function<void(int bucket_idx)> apply;
  /// Group in which the ranks of `dp` tell each other what hosts have to know:
  /// whether there is something to reduce, and which parameters were used. It
  /// carries tensors of the host, has the order of `dp`, and is not used by
  /// other code. Null: `dp` itself, which then is not a group of a device.
  comm::CommunicatorPtr control;
  comm::WaitOptions wait;

  bool is_sharded() const { return sharding.has_value(); }
  bool applies() const { return apply != nullptr; }
  /// Returns whether full buckets have memory only from their first gradient to
  /// the end of their reduction.
  bool lends_memory() const { return is_sharded() || applies(); }
  bool every_microbatch() const {
    return is_sharded() && sharding->every_microbatch;
  }
  /// Returns the divisor of the sum of a step over its microbatches.
  /// @param are_shares  each backward began with the share of its microbatch in
  ///     the mean over the batches of all replicas
  double pass_divisor(int num_microbatches, bool are_shares) const {
    if (are_shares)
      return average_over_microbatches ? 1 : 1.0 / num_microbatches;
    return num_batches * (average_over_microbatches ? num_microbatches : 1);
  }
};

/// Counts of the work of a `Reducer`.
struct ReducerStats {
  int64_t num_reductions = 0;     ///< steps that were reduced
  int64_t num_early_buckets = 0;  ///< reduced while backward went on
  /// Sums over further groups that began while backward went on.
  int64_t num_early_hops = 0;
  int64_t num_late_parameters = 0;  ///< parameters with a second round
  int64_t num_rounds = 0;           ///< sums over ranks that were begun
  /// Size of full buckets where gradients are sharded; 0 between steps.
  int64_t flat_bytes = 0;
  int64_t peak_flat_bytes = 0;
};

}  // namespace smp::gradients
