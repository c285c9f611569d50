#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/data_parallel/agreement.h"
#include "csrc/data_parallel/bucket_plan.h"
#include "csrc/data_parallel/flat_bucket.h"
#include "csrc/data_parallel/gradient_hook.h"
#include "csrc/data_parallel/microbatch_order.h"
#include "csrc/data_parallel/parameter_record.h"

namespace smp::data_parallel {

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
/// Ranks need not agree on how many gradients a parameter gets: buckets are
/// always reduced in the order of their indices. They must agree on steps: all
/// or none of the ranks end a step, unless they cancel it. The numbers of
/// microbatches may differ: each rank takes the mean over its own.
///
/// Thread-safe. Gradients are added on the current stream of the thread that
/// computed them. The lock is never held while waiting for another rank.
class Reducer {
 public:
  struct Options {
    int64_t bucket_cap_bytes = int64_t{25} << 20;
    /// Reduce during backward, else at the end of the step.
    bool overlap = true;
    /// Divide by the number of microbatches.
    bool average_over_microbatches = true;
    /// Steps whose gradients are added up before they are reduced, once. After
    /// the others `.grad` holds the sum so far of this rank alone. Setting
    /// `.grad` to None in between forgets that sum.
    int passes_per_reduction = 1;
    Patience patience;
  };

  struct Stats {
    int64_t num_reductions = 0;       ///< steps that were reduced
    int64_t num_early_buckets = 0;    ///< reduced while backward went on
    int64_t num_late_parameters = 0;  ///< needed a second round
  };

  /// Collective over `dp`.
  /// @param params   leaves that require a gradient, one per record, all on
  ///                 one device; in their final place (see GradientHooks)
  /// @param records  equal on all ranks of the group, and all of that group
  /// @param dp       may be null, like a group of one
  /// @throws ValueError on every rank when the ranks disagree on the records
  Reducer(std::vector<at::Tensor> params, std::vector<ParameterRecord> records,
          comm::CommunicatorPtr dp, Options options);
  /// Not while a backward runs.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Opens a step. @throws Error when one is open
  /// @param may_overlap  false: nothing is reduced before the end, because
  ///     other reducers of the same group are at work
  void begin_step(int num_microbatches, bool may_overlap = true);

  /// The backward of a microbatch is over on this rank. Optional, but without
  /// it gradients of later microbatches wait in memory for the end.
  void finish_microbatch(int mb);

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
  /// Flat gradient tensor of a bucket; valid between steps.
  const at::Tensor& flat(int bucket_idx) const;

 private:
  enum class Phase { kIdle, kOpen, kImplicit, kEnding };
  using Lock = std::unique_lock<std::mutex>;

  bool has_peers() const { return dp_ && dp_->size() > 1; }
  bool is_last_pass() const {
    return pass_idx_ + 1 == options_.passes_per_reduction;
  }
  double pass_divisor() const;
  FlatBucket& bucket_of(int param_idx);
  int slot_of(int param_idx) const { return plan_.places[param_idx].slot_idx; }

  void check_arguments() const;
  void open(int num_microbatches, Phase phase);
  void keep_old_grads();
  void on_gradient(int param_idx, const at::Tensor& grad);
  void begin_implicit_step();
  void add(int param_idx, const at::Tensor& grad);
  bool may_launch_early() const;
  void launch_complete_buckets();
  void launch_header();
  void launch_bucket();

  void close(Lock& lock);
  void abandon();
  bool any_rank_active(Lock& lock);
  void reduce(Lock& lock);
  std::vector<bool> reduce_over_ranks(Lock& lock);
  void reduce_late(int bucket_idx, const std::vector<bool>& late);
  void publish(const std::vector<bool>& used);
  void forget_old_grads();
  void learn_counts();

  const std::vector<at::Tensor> params_;
  const std::vector<ParameterRecord> records_;
  const comm::CommunicatorPtr dp_;
  const Options options_;
  const BucketPlan plan_;
  at::Device device_ = at::kCPU;
  std::vector<FlatBucket> buckets_;

  mutable std::mutex mutex_;  // guards all that follows
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
  std::vector<int> num_added_;
  std::map<int, std::vector<at::Tensor>> late_;

  // Gradients per parameter in earlier steps.
  struct Learned {
    std::vector<int> most;            // of a step
    std::vector<int> per_microbatch;  // 0: not the same in all of them
  };
  std::map<int, Learned> learned_;              // by number of microbatches
  const std::vector<int>* expected_ = nullptr;  // `most` of this step, if any
  std::vector<int> num_missing_;  // per bucket: parameters not yet complete

  // The reduction under way.
  bool active_ = false;  // a gradient has come in this step
  at::Tensor header_;
  comm::WorkPtr header_work_;
  std::vector<comm::WorkPtr> works_;  // launched buckets, in index order

  std::weak_ptr<void> implicit_token_;    // lives as long as that backward
  std::unique_ptr<GradientHooks> hooks_;  // last: they call into the above
};

}  // namespace smp::data_parallel
