#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "csrc/gradients/bucket_table.h"

namespace smp::gradients {

/// The sums over ranks of one round: the buckets that are on their way, and
/// those that have come back. Buckets leave and end in the order of their
/// indices, so ranks may disagree on when each of them can leave.
///
/// Full buckets of a sharded reducer have memory from their first gradient to
/// their reduce-scatter: at most two at a time, unless other ranks are late.
///
/// Guarded by the mutex of its reducer. A method that gets the lock opens it
/// while it waits for another rank.
class ReductionRound {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// The bucket for which `await_oldest` has waited.
  struct Waited {
    int bucket_idx;
    bool is_over;
  };

  /// The arguments must outlive this object.
  ReductionRound(const BucketTable& buckets, const ReductionGroups& groups,
                 const ReducerOptions& options)
      : buckets_(buckets), groups_(groups), options_(options) {}

  /// Begins the first round of a step, or another one.
  /// @param is_last_pass  the sums of this step go on over the further groups
  /// @param are_shares    see `ReducerOptions::pass_divisor`
  void begin_first(int num_microbatches, bool is_last_pass, bool are_shares);
  void begin_next();
  /// Notes that a gradient has come here.
  void note_gradient() { is_active_ = true; }

  /// Returns the divisor of this rank's sum in a bucket; the bucket's own
  /// divisor comes on top.
  double pass_divisor() const {
    return options_.pass_divisor(num_microbatches_, are_shares_);
  }
  /// Returns whether a bucket is left that has not been launched.
  bool has_next() const { return num_launched_ < buckets_.size(); }
  int next_idx() const { return num_launched_; }
  /// Begins the sum of the next bucket, to which no more gradients come.
  /// @param used  by parameter: whether a gradient has come here. Where buckets
  ///     are applied one by one, ranks exchange it beside each sum
  void launch_next(const std::vector<bool>& used);
  /// Returns whether a gradient has come on any rank; no more come here.
  /// @throws Error where ranks are at different points
  bool is_active_anywhere(Lock& lock);
  void launch_rest(const std::vector<bool>& used);

  /// Returns whether as many buckets are on their way as may have memory.
  bool is_full() const;
  /// Waits for the oldest bucket on its way, for a while.
  Waited await_oldest(Lock& lock);
  /// Takes the memory of a bucket back, if it has come meanwhile.
  void settle(Waited waited);
  /// Takes back the memory of buckets that have come.
  void settle_finished();
  /// Waits for all buckets.
  void settle_all(Lock& lock);
  int num_settled() const { return num_settled_; }
  /// Returns, by slot of a settled bucket, whether some rank has a gradient.
  std::vector<bool> used_anywhere(int bucket_idx) const;
  /// Begins the further sums of shards that have not begun yet. Where sums are
  /// the host's, they begin behind each first sum of a step's last round. On a
  /// device all groups have to be used in one order on all ranks, and ranks
  /// differ in which sums are over in the middle of a backward.
  void reduce_further(Lock& lock);
  /// Returns the number of further sums that began while gradients still came,
  /// of all steps.
  int64_t num_early_hops() const { return num_early_hops_; }

  /// Returns whether operations of the round may be in flight.
  bool is_under_way() const { return header_work_ != nullptr; }
  /// Ends the round: none of its operations is in flight, or no code waits for
  /// it.
  void end() { header_work_ = nullptr; }

 private:
  static constexpr std::chrono::milliseconds kLongestRoomPatience{1000};

  void begin();
  void launch_header();
  void announce(const std::vector<bool>& used);
  bool is_over(int bucket_idx) const;
  void settle_next();
  bool go_further(int bucket_idx);
  bool may_go_further() const;
  void await(int bucket_idx, Lock& lock) const;

  const BucketTable& buckets_;
  const ReductionGroups& groups_;
  const ReducerOptions& options_;

  int num_microbatches_ = 0;  // of the step
  int round_idx_ = 0;         // in the step
  bool is_last_pass_ = false;
  bool are_shares_ = false;
  int64_t num_early_hops_ = 0;
  int num_hopped_ = 0;  // buckets whose first further sum began, in index order
  bool is_active_ = false;
  at::Tensor header_;
  comm::WorkPtr header_work_;
  /// Operations of hosts, by bucket: over when all ranks have launched the sum.
  /// Only where memory is lent and sums are a device's, or buckets are applied.
  std::vector<comm::WorkPtr> announced_;
  /// Flags that they exchange where buckets are applied: 1 in slots that some
  /// rank has used.
  std::vector<at::Tensor> used_;
  int num_launched_ = 0;  // buckets, in index order
  int num_settled_ = 0;   // those of them that are settled
  std::chrono::milliseconds room_patience_ = kLongestRoomPatience;
};

}  // namespace smp::gradients
