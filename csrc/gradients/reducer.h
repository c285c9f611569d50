#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

#include "csrc/common/microbatch_listener.h"
#include "csrc/gradients/grad_targets.h"
#include "csrc/gradients/gradient_counts.h"
#include "csrc/gradients/gradient_hook.h"
#include "csrc/gradients/late_gradients.h"
#include "csrc/gradients/microbatch_order.h"
#include "csrc/gradients/reduction_round.h"

namespace smp::gradients {

/// Collects the gradients of parameters that this rank holds and averages them
/// over a group of ranks, `dp` below: the data-parallel ranks, or those of them
/// that hold the same slices (rdp).
///
/// While a step is open, gradients are summed in flat buckets, in microbatch
/// order. At its end a bucket is divided once (unless gradients came divided,
/// as shares), summed over the ranks, and `.grad` of each parameter becomes a
/// view of it (`GradTargets`). From the second step on a bucket is reduced
/// while backward goes on (`GradientCounts`). A backward outside a step is a
/// step of its own with one microbatch.
///
/// With `Options::apply` a gradient has memory no longer than that needs: a
/// bucket is applied as soon as it was summed, and its memory serves another
/// one. Such a step has one microbatch, and a parameter gets no gradient after
/// its bucket was applied.
///
/// The tensor that has `.grad` may be another one than the parameter, its
/// *target*: a master of another dtype, or of a part of the parameter. With
/// `Options::sharding` a rank keeps its shard of each bucket only.
///
/// Ranks may disagree on how many gradients a parameter gets. They must agree
/// on steps: all or none of the ranks end a step, unless they cancel it. The
/// numbers of microbatches may differ, but not where every microbatch is
/// reduced.
///
/// Thread-safe. Gradients are added on the stream on which their step was
/// begun; outside of steps on that of the last one. The lock is never held
/// while waiting for another rank.
///
/// Where `dp` sums on streams of a device, the host waits for no sum: later
/// work on the current stream comes after it. One stream then computes all
/// gradients of a rank. Hosts exchange their own messages over
/// `Options::control`.
class Reducer : public MicrobatchListener {
 public:
  using Options = ReducerOptions;
  using Stats = ReducerStats;

  /// Collective over `dp`.
  /// @param params   leaves that require a gradient, one per record, all on
  ///                 one device; in their final place (see GradientHooks)
  /// @param targets  leaves whose `.grad` is set, one per parameter, of the
  ///                 accumulation dtype: of the parameter's sizes, or sharded
  ///                 with as many elements as this rank holds of it (or has
  ///                 room for); undefined where it updates nothing. Empty: the
  ///                 parameters themselves
  /// @param records  equal on all ranks of the group, and all of that group
  /// @param dp       may be null, like a group of one. With sharding the
  ///                 product of its groups
  /// @throws ValueError on every rank when the ranks disagree on the records
  Reducer(std::vector<at::Tensor> params, std::vector<at::Tensor> targets,
          std::vector<ParameterRecord> records, comm::CommunicatorPtr dp,
          Options options);
  /// Destroys the reducer; not while a backward runs.
  ~Reducer() override;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Opens a step. @throws Error when one is open
  /// @param may_overlap  false: nothing is reduced before the end, because
  ///     other reducers of the same group are at work
  /// @param are_shares  each backward begins with the share of its microbatch
  ///     in the mean over the batches of all ranks: gradients are only summed.
  ///     A backward outside a step never begins so
  void begin_step(int num_microbatches, bool may_overlap = true,
                  bool are_shares = false);

  /// Notes that the backward of a microbatch is over on this rank. Optional,
  /// but without it gradients of later microbatches wait in memory for the end.
  /// Where every microbatch is reduced it is required: collective over `dp`, in
  /// the order of the microbatches.
  void finish_microbatch(int mb);
  /// Finishes a microbatch for the runner of steps; nothing if no step is open
  /// here.
  void on_microbatch_end(int mb) override;

  /// Reduces what is left and sets `.grad`. Does nothing to gradients when no
  /// rank of the group had a backward. Collective over `dp`.
  void end_step();

  /// Closes a step that failed, or had no backward, without messages to other
  /// ranks. Its gradients are lost.
  void cancel_step();

  bool in_step() const;
  Stats stats() const;
  const std::vector<ParameterRecord>& records() const {
    return parameters_.records;
  }
  const BucketPlan& plan() const { return buckets_.plan(); }
  /// Returns the flat gradient tensor of a bucket, or this rank's shard of it;
  /// valid between steps.
  const at::Tensor& flat(int bucket_idx) const;

 private:
  enum class Phase { kIdle, kOpen, kImplicit, kEnding };
  using Lock = std::unique_lock<std::mutex>;

  bool is_last_pass() const {
    return pass_idx_ + 1 == options_.passes_per_reduction;
  }
  /// Returns whether this pass is summed over ranks. Shards are summed in each
  /// pass.
  bool reduces() const { return options_.is_sharded() || is_last_pass(); }

  void open(int num_microbatches, Phase phase, bool are_shares);
  void begin_implicit_step();
  void on_gradient(int param_idx, const at::Tensor& grad);
  void await_room(int param_idx, Lock& lock);
  void add(int param_idx, const at::Tensor& grad);
  void expect_as_first();
  bool may_launch_early() const;
  void launch_complete_buckets();
  bool launch_rest(Lock& lock);
  void apply_settled(Lock& lock);
  void apply_rest(Lock& lock);

  void close(Lock& lock);
  void abandon();
  void finish_pass(Lock& lock);
  std::vector<bool> finish_sums(Lock& lock);

  const Options options_;
  const ReductionGroups groups_;
  const ReducedParameters parameters_;
  BucketTable buckets_;

  mutable std::mutex mutex_;  // guards all that follows, and the buckets
  MicrobatchOrder order_;
  GradientCounts counts_;
  ReductionRound round_;
  LateGradients late_;
  GradTargets targets_;
  Phase phase_ = Phase::kIdle;
  bool broken_ = false;  // a reduction was abandoned half-way
  int pass_idx_ = 0;
  int num_applied_ = 0;  // buckets of this step, in index order
  Stats stats_;
  // State of this step.
  bool may_overlap_ = true;
  bool active_ = false;      // a gradient has come here
  bool any_active_ = false;  // and on some rank

  std::weak_ptr<void> implicit_token_;    // lives as long as that backward
  std::unique_ptr<GradientHooks> hooks_;  // last: they call into the above
};

}  // namespace smp::gradients
