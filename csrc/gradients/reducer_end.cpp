// The end of a microbatch and of a step: agreement, last sums, and what becomes
// `.grad`.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "csrc/comm/agreement.h"
#include "csrc/common/check.h"
#include "csrc/gradients/reducer.h"

namespace smp::gradients {

void Reducer::finish_microbatch(int mb) {
  const at::NoGradGuard no_grad;
  Lock lock(mutex_);
  SMP_CHECK(phase_ == Phase::kOpen, "microbatch ", mb,
            " was finished, but no step is open");
  if (mb == 0) expect_as_first();
  order_.finish(mb);
  if (!options_.every_microbatch()) return;
  // After the last round there is no round for them: sums over copies have
  // begun.
  order_.emit_surplus(mb);
  phase_ = Phase::kEnding;  // nothing comes while this thread waits
  try {
    if (launch_rest(lock)) round_.settle_all(lock);
    counts_.begin_round();
    round_.begin_next();
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    abandon();
    throw;
  }
  phase_ = Phase::kOpen;
}

void Reducer::on_microbatch_end(int mb) {
  if (in_step()) finish_microbatch(mb);
}

// Launches the rest of this round, in which nothing more will come. If some
// rank has gradients, all buckets are on their way afterwards; in a pass that
// is not reduced they stay here.
bool Reducer::launch_rest(Lock& lock) {
  const bool any = round_.is_active_anywhere(lock);
  any_active_ = any_active_ || any;
  if (!any || !reduces()) return any;
  if (options_.applies()) {
    apply_rest(lock);
  } else {
    round_.launch_rest(targets_.used());
  }
  ++stats_.num_rounds;
  return true;
}

// Sums and applies the rest, a few buckets at a time, since each of them takes
// memory.
void Reducer::apply_rest(Lock& lock) {
  while (round_.has_next()) {
    if (round_.is_full()) round_.settle_all(lock);
    apply_settled(lock);
    round_.launch_next(targets_.used());
  }
  round_.settle_all(lock);
  apply_settled(lock);
}

void Reducer::end_step() {
  const at::NoGradGuard no_grad;
  Lock lock(mutex_);
  SMP_CHECK(phase_ == Phase::kOpen || phase_ == Phase::kImplicit,
            "a step was ended, but none is open");
  phase_ = Phase::kEnding;
  try {
    close(lock);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    abandon();
    throw;
  }
}

void Reducer::cancel_step() {
  const at::NoGradGuard no_grad;
  const Lock lock(mutex_);
  if (phase_ != Phase::kIdle) abandon();
}

// Ends a failed step. Its gradients are lost; the earlier `.grad` comes back.
void Reducer::abandon() {
  // Operations in flight still write to the buckets.
  broken_ = broken_ || round_.is_under_way();
  round_.end();
  late_.clear();
  phase_ = Phase::kIdle;
  order_.begin(0, {});
  if (!active_ && !any_active_) return;
  targets_.restore();
  for (const auto& bucket : buckets_) bucket->abandon();
  buckets_.pool().trim();
  pass_idx_ = 0;
}

void Reducer::close(Lock& lock) {
  expect_as_first();
  order_.finish_all();
  launch_rest(lock);
  if (any_active_) {
    finish_pass(lock);
    if (active_) counts_.learn(order_.counts());
  } else if (pass_idx_ == 0) {
    targets_.forget_old();
  }
  round_.end();
  buckets_.pool().trim();
  phase_ = Phase::kIdle;
  order_.begin(0, {});
}

void Reducer::finish_pass(Lock& lock) {
  if (options_.applies()) {
    SMP_ASSERT(num_applied_ == buckets_.size(), num_applied_, " of ",
               buckets_.size(), " buckets were applied");
  } else if (reduces()) {
    // A shard goes on with the next pass, and must not have old gradients
    // twice.
    const bool goes_on = options_.is_sharded() && !is_last_pass();
    targets_.publish_sums(finish_sums(lock), goes_on);
  } else {
    for (const auto& bucket : buckets_)
      bucket->keep_pass(round_.pass_divisor());
    targets_.publish_own();
  }
  if (!is_last_pass()) {
    ++pass_idx_;
    return;
  }
  ++stats_.num_reductions;
  pass_idx_ = 0;
  for (const auto& bucket : buckets_) bucket->drop_passes();
  targets_.forget_old();
}

// Returns which parameters some rank has used.
std::vector<bool> Reducer::finish_sums(Lock& lock) {
  if (!groups_.has_peers()) {
    round_.settle_all(lock);
    return targets_.used();
  }
  const std::vector<bool>& used = targets_.used();
  const auto num_params = static_cast<int>(used.size());
  std::vector<int64_t> flags(used.begin(), used.end());
  for (int i = 0; i < num_params; ++i) flags.push_back(late_.has(i) ? 1 : 0);
  lock.unlock();
  flags = comm::agree_on_maxima(groups_.control(), flags, options_.wait,
                                "exchange of used parameters");
  lock.lock();
  round_.settle_all(lock);
  if (is_last_pass()) round_.reduce_further(lock);
  late_.reduce({flags.begin() + num_params, flags.end()}, round_.pass_divisor(),
               is_last_pass(), lock);
  stats_.num_late_parameters += late_.num_parameters();
  late_.clear();
  return {flags.begin(), flags.begin() + num_params};
}

}  // namespace smp::gradients
