#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/comm/agreement.h"
#include "csrc/comm/communicator.h"
#include "csrc/common/microbatch_listener.h"
#include "csrc/gradients/bucket_plan.h"
#include "csrc/gradients/bucket_reduction.h"
#include "csrc/gradients/flat_pool.h"
#include "csrc/gradients/gradient_hook.h"
#include "csrc/gradients/microbatch_order.h"
#include "csrc/gradients/parameter_record.h"
#include "csrc/gradients/reducer_options.h"

namespace smp::gradients {

/// Collects the gradients of parameters that this rank holds and averages them
/// over a group of ranks, `dp` below: the data-parallel ranks, or those of them
/// that hold the same slices (rdp).
///
/// While a step is open, gradients are summed unscaled in flat buckets, in
/// microbatch order. At its end a bucket is divided once, summed over the
/// ranks, and `.grad` of each parameter becomes a view of it; a `.grad` that
/// was there before is added afterwards. From the second step on a bucket is
/// reduced as soon as its parameters have got as many gradients as they got
/// before, while backward goes on; what comes beyond that number is reduced in
/// a second round, also when the bucket has not been reduced by then: timing
/// never decides on the order of a sum. A parameter that no rank used keeps its
/// `.grad` (or None).
///
/// A backward outside a step is a step of one microbatch of its own.
///
/// What has `.grad` may be another tensor than the parameter, its *target*: a
/// master of another dtype, or of a part of it. With `Options::sharding` a rank
/// keeps its shard of each bucket only, and full buckets have memory from their
/// first gradient to their reduce-scatter: at most two at a time, unless other
/// ranks are late. A *round* is what is reduced together: a step, or one of its
/// microbatches.
///
/// Ranks need not agree on how many gradients a parameter gets: buckets are
/// always reduced in the order of their indices. They must agree on steps: all
/// or none of the ranks end a step, unless they cancel it. The numbers of
/// microbatches may differ, each rank takes the mean over its own; not where
/// every microbatch is reduced.
///
/// Thread-safe. Gradients are added on the current stream of the thread that
/// computed them. The lock is never held while waiting for another rank.
///
/// Where `dp` sums on streams of a device, the host waits for no sum: what
/// comes next on the current stream comes after it. One stream then computes
/// all gradients of a rank. What hosts have to know of each other goes over
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
  /// Not while a backward runs.
  ~Reducer() override;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Opens a step. @throws Error when one is open
  /// @param may_overlap  false: nothing is reduced before the end, because
  ///     other reducers of the same group are at work
  void begin_step(int num_microbatches, bool may_overlap = true);

  /// The backward of a microbatch is over on this rank. Optional, but without
  /// it gradients of later microbatches wait in memory for the end. Where every
  /// microbatch is reduced it is not: collective over `dp`, in their order.
  void finish_microbatch(int mb);
  /// The same, called by the runner of steps; nothing if none is open here.
  void on_microbatch_end(int mb) override;

  /// Reduces what is left and sets `.grad`. Does nothing to gradients when no
  /// rank of the group had a backward. Collective over `dp`.
  void end_step();

  /// Closes a step that failed, or had no backward, without talking to others.
  /// Its gradients are lost.
  void cancel_step();

  bool in_step() const;
  Stats stats() const;
  const std::vector<ParameterRecord>& records() const { return records_; }
  const BucketPlan& plan() const { return plan_; }
  /// Flat gradient tensor of a bucket, or this rank's shard of it; valid
  /// between steps.
  const at::Tensor& flat(int bucket_idx) const;

 private:
  enum class Phase { kIdle, kOpen, kImplicit, kEnding };
  using Lock = std::unique_lock<std::mutex>;

  static constexpr std::chrono::milliseconds kLongestRoomPatience{1000};

  bool has_peers() const { return dp_ && dp_->size() > 1; }
  bool is_stream_ordered() const {
    return has_peers() && dp_->is_stream_ordered();
  }
  comm::Communicator& control() const {
    return options_.control ? *options_.control : *dp_;
  }
  bool is_sharded() const { return options_.sharding.has_value(); }
  bool every_microbatch() const {
    return is_sharded() && options_.sharding->every_microbatch;
  }
  bool is_last_pass() const {
    return pass_idx_ + 1 == options_.passes_per_reduction;
  }
  /// Is this pass summed over ranks? Shards are in each.
  bool reduces() const { return is_sharded() || is_last_pass(); }
  comm::Communicator& first_group() const;
  double pass_divisor() const;
  BucketReduction& bucket_of(int param_idx) const;
  int slot_of(int param_idx) const { return plan_.places[param_idx].slot_idx; }

  void check_parameters() const;
  void check_sharding(const std::vector<ShardedBucket>& plan) const;
  void make_buckets();
  void open(int num_microbatches, Phase phase);
  void keep_old_grads();
  void on_gradient(int param_idx, const at::Tensor& grad);
  void begin_implicit_step();
  void add(int param_idx, const at::Tensor& grad);

  // Rounds.
  void begin_round();
  void count_missing();
  void expect_as_first();
  bool may_launch_early() const;
  void launch_complete_buckets();
  void launch_header();
  void launch_bucket();
  bool any_rank_active(Lock& lock);
  bool launch_round(Lock& lock);
  void await_room(int param_idx, Lock& lock);
  void settle_finished();
  void settle_next();
  void settle_all(Lock& lock);
  void await(int bucket_idx, Lock& lock) const;

  // The end of a step.
  void close(Lock& lock);
  void abandon();
  void finish_pass(Lock& lock);
  std::vector<bool> finish_sums(Lock& lock);
  void reduce_late(int bucket_idx, const std::vector<bool>& late, Lock& lock);
  void reduce_further(Lock& lock);
  void publish(const std::vector<bool>& used);
  void forget_old_grads();
  void learn_counts();

  const std::vector<at::Tensor> params_;
  const std::vector<at::Tensor> targets_;
  const std::vector<ParameterRecord> records_;
  const comm::CommunicatorPtr dp_;
  const Options options_;
  const BucketPlan plan_;
  at::Device device_ = at::kCPU;
  FlatPool pool_;
  std::vector<std::unique_ptr<BucketReduction>> buckets_;

  mutable std::mutex mutex_;  // guards all that follows, pool and buckets
  MicrobatchOrder order_;
  Phase phase_ = Phase::kIdle;
  bool broken_ = false;  // a reduction was abandoned half-way
  int num_microbatches_ = 0;
  bool may_overlap_ = true;
  int pass_idx_ = 0;
  Stats stats_;

  // Per parameter. Over the passes of one reduction:
  std::vector<at::Tensor> old_grads_;  // `.grad` from before; may be undefined
  std::vector<bool> used_;
  // Of this step:
  std::map<int, std::vector<at::Tensor>> late_;
  std::vector<int> most_added_;  // in one of its rounds
  // Of this round:
  std::vector<int> num_added_;

  // Gradients per parameter in earlier steps.
  struct Learned {
    std::vector<int> most;            // of a round
    std::vector<int> per_microbatch;  // 0: not the same in all of them
  };
  std::map<int, Learned> learned_;  // by number of microbatches
  std::vector<int> guess_;          // where nothing is known
  bool learns_from_first_ = false;  // the guess is made after microbatch 0
  const std::vector<int>* expected_ = nullptr;  // `most` of this step, if any
  std::vector<int> num_missing_;  // per bucket: parameters not yet complete

  // Of this step: a gradient has come here, and on some rank.
  bool active_ = false;
  bool any_active_ = false;
  // The round under way.
  int round_idx_ = 0;          // in the step
  bool round_active_ = false;  // a gradient has come here
  at::Tensor header_;
  comm::WorkPtr header_work_;
  /// Of a device, by bucket: over when all ranks have launched it.
  std::vector<comm::WorkPtr> announced_;
  int num_launched_ = 0;  // buckets, in index order
  int num_settled_ = 0;   // of these
  std::chrono::milliseconds room_patience_ = kLongestRoomPatience;

  std::weak_ptr<void> implicit_token_;    // lives as long as that backward
  std::unique_ptr<GradientHooks> hooks_;  // last: they call into the above
};

}  // namespace smp::gradients
