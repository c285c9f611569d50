#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "csrc/gradients/bucket_table.h"

namespace smp::gradients {

/// The sums over ranks of one round: which buckets are on their way, and what
/// has come back. Buckets leave in the order of their indices, and end in it,
/// so ranks need not agree on when each of them can leave.
///
/// Full buckets of a sharded reducer have memory from their first gradient to
/// their reduce-scatter: at most two at a time, unless other ranks are late.
///
/// Belongs to the mutex of its reducer. A lock that a method is given is not
/// held while that waits for another rank.
class ReductionRound {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// What `await_oldest` has waited for.
  struct Waited {
    int bucket_idx;
    bool is_over;
  };

  /// The arguments outlive this.
  ReductionRound(const BucketTable& buckets, const ReductionGroups& groups,
                 const ReducerOptions& options)
      : buckets_(buckets), groups_(groups), options_(options) {}

  /// The first round of a step begins, or another one.
  /// @param is_last_pass  the sums of this step go on over the further groups
  /// @param are_shares    see `ReducerOptions::pass_divisor`
  void begin_first(int num_microbatches, bool is_last_pass, bool are_shares);
  void begin_next();
  /// A gradient has come here.
  void note_gradient() { is_active_ = true; }

  /// Divides the sum of this rank in a bucket, before that of the bucket.
  double pass_divisor() const {
    return options_.pass_divisor(num_microbatches_, are_shares_);
  }
  /// Whether a bucket is left that has not been launched.
  bool has_next() const { return num_launched_ < buckets_.size(); }
  int next_idx() const { return num_launched_; }
  /// Begins the sum of the next bucket, to which nothing comes any more.
  void launch_next();
  /// Whether a gradient has come on any rank; nothing comes here any more.
  /// @throws Error where ranks are at different points
  bool is_active_anywhere(Lock& lock);
  void launch_rest();

  /// Whether as many buckets are on their way as may have memory.
  bool is_full() const;
  /// Waits for the oldest of them, for a while.
  Waited await_oldest(Lock& lock);
  /// Takes its memory back, if it has come meanwhile.
  void settle(Waited waited);
  /// Takes back the memory of buckets that have come.
  void settle_finished();
  /// Waits for all.
  void settle_all(Lock& lock);
  /// What follows the first sums where shards are kept, as far as it has not
  /// begun behind each of them: that it does in the last round of a step whose
  /// sums are the host's. On a device all groups have to be used in one order
  /// on all ranks, and which sums are over in the middle of a backward differs.
  void reduce_further(Lock& lock);
  /// Further sums that began while gradients still came, of all steps.
  int64_t num_early_hops() const { return num_early_hops_; }

  /// Operations of it may be in flight.
  bool is_under_way() const { return header_work_ != nullptr; }
  /// None of it is in flight, or nobody waits for it.
  void end() { header_work_ = nullptr; }

 private:
  static constexpr std::chrono::milliseconds kLongestRoomPatience{1000};

  void begin();
  void launch_header();
  void settle_next();
  bool go_further(int bucket_idx);
  bool may_go_further() const;
  void await(int bucket_idx, Lock& lock) const;

  const BucketTable& buckets_;
  const ReductionGroups& groups_;
  const ReducerOptions& options_;

  int num_microbatches_ = 0;  // of the step
  int round_idx_ = 0;         // in it
  bool is_last_pass_ = false;
  bool are_shares_ = false;
  int64_t num_early_hops_ = 0;
  int num_hopped_ = 0;  // buckets whose first further sum began, in index order
  bool is_active_ = false;
  at::Tensor header_;
  comm::WorkPtr header_work_;
  /// Of a device, by bucket: over when all ranks have launched it.
  std::vector<comm::WorkPtr> announced_;
  int num_launched_ = 0;  // buckets, in index order
  int num_settled_ = 0;   // of these
  std::chrono::milliseconds room_patience_ = kLongestRoomPatience;
};

}  // namespace smp::gradients
