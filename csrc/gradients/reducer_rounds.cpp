// Rounds of a reduction: which buckets leave when, and what comes back.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/gradients/reducer.h"

namespace smp::gradients {
namespace {

constexpr std::chrono::milliseconds kShortestRoomPatience{1};

// An operation that failed is finished, too; code that needs its result is
// told.
bool finishes_within(comm::Work& work, std::chrono::milliseconds limit) {
  try {
    work.wait(limit);
  } catch (const Error&) {
    return work.done();
  }
  return true;
}

}  // namespace

void Reducer::begin_round() {
  round_active_ = false;
  header_work_ = nullptr;
  announced_.clear();
  num_launched_ = num_settled_ = 0;
  num_added_.assign(params_.size(), 0);
  num_missing_.assign(buckets_.size(), 0);
  for (const auto& bucket : buckets_) bucket->begin_round();
  count_missing();
}

void Reducer::count_missing() {
  if (expected_ == nullptr) return;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (num_added_[i] < (*expected_)[i]) {
      ++num_missing_[plan_.places[i].bucket_idx];
    }
  }
}

// So far only gradients of the first microbatch were added, because those of
// later ones wait until it is finished: when this happens is a matter of
// timing, what is expected from here on is not.
void Reducer::expect_as_first() {
  if (!std::exchange(learns_from_first_, false)) return;
  guess_ = num_added_;
  if (!every_microbatch()) {
    for (int& count : guess_) count *= num_microbatches_;
  }
  expected_ = &guess_;
  count_missing();
  launch_complete_buckets();
}

void Reducer::finish_microbatch(int mb) {
  const at::NoGradGuard no_grad;
  Lock lock(mutex_);
  SMP_CHECK(phase_ == Phase::kOpen, "microbatch ", mb,
            " was finished, but no step is open");
  if (mb == 0) expect_as_first();
  order_.finish(mb);
  if (!every_microbatch()) return;
  phase_ = Phase::kEnding;  // nothing comes while this thread waits
  try {
    if (launch_round(lock)) settle_all(lock);
    ++round_idx_;
    begin_round();
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

bool Reducer::may_launch_early() const {
  return has_peers() && options_.overlap && may_overlap_ && reduces();
}

void Reducer::launch_complete_buckets() {
  if (!may_launch_early()) return;
  const auto num_buckets = static_cast<int>(buckets_.size());
  while (num_launched_ < num_buckets && num_missing_[num_launched_] == 0) {
    launch_bucket();
    if (phase_ != Phase::kEnding) ++stats_.num_early_buckets;
  }
}

// Always the first operation of a round, so that a rank without any gradient
// can find out whether others reduce something, before it takes part. Where
// each microbatch is a round, it also tells ranks that have more of them. The
// host reads it, hence it never lies on a device.
void Reducer::launch_header() {
  if (header_work_) return;
  std::vector<int64_t> words = {round_active_ ? 1 : 0};
  if (every_microbatch()) {
    for (const int64_t word : {num_microbatches_, round_idx_}) {
      words.insert(words.end(), {word, -word});
    }
  }
  header_ = at::empty({static_cast<int64_t>(words.size())}, at::kLong);
  std::copy(words.begin(), words.end(), header_.mutable_data_ptr<int64_t>());
  header_work_ = control().all_reduce(header_, comm::ReduceOp::kMax);
}

void Reducer::launch_bucket() {
  if (has_peers()) launch_header();
  buckets_[num_launched_]->launch(pass_divisor());
  ++num_launched_;
  if (is_sharded() && is_stream_ordered()) {
    announced_.push_back(control().barrier());
  }
}

bool Reducer::any_rank_active(Lock& lock) {
  if (!has_peers()) return round_active_;
  launch_header();
  lock.unlock();
  comm::wait_for(*header_work_, options_.patience, control(),
                 "begin of the reduction");
  lock.lock();
  const auto* words = header_.const_data_ptr<int64_t>();
  for (int64_t i = 1; i < header_.numel(); i += 2) {
    SMP_CHECK(words[i] == -words[i + 1], "the ranks of ", dp_->name(),
              " are at different microbatches: between ", -words[i + 1],
              " and ", words[i], i == 1 ? " of them in a step" : " are over",
              "; where gradients are reduced after every microbatch, all ranks "
              "need equally many");
  }
  return words[0] != 0;
}

// Nothing more will come in this round. If some rank has gradients, all buckets
// are on their way afterwards, or in a pass that is not reduced stay here.
bool Reducer::launch_round(Lock& lock) {
  const bool any = any_rank_active(lock);
  any_active_ = any_active_ || any;
  if (!any || !reduces()) return any;
  const auto num_buckets = static_cast<int>(buckets_.size());
  while (num_launched_ < num_buckets) launch_bucket();
  ++stats_.num_rounds;
  return true;
}

// Gradients may come faster than their sums leave, and full buckets would pile
// up: the backward waits here before a bucket takes memory while two others
// have some. Only for a while, because the others may need this rank before
// they come so far (where they use other parameters, and their buckets leave at
// the end only), and for a shorter one each time that this was in vain. It is a
// matter of memory alone; sums do not depend on it.
//
// Of a device the host does not wait for the sum but for the hosts of the other
// ranks: once all have launched it, it ends by itself, and the memory may be
// taken again by what is computed behind it. Earlier the device could wait for
// a rank that waits for what this device does next.
void Reducer::await_room(int param_idx, Lock& lock) {
  constexpr int kMostOnTheirWay = 1;
  const auto is_full = [&] {
    const bool is_open = phase_ == Phase::kOpen || phase_ == Phase::kImplicit;
    return is_open && num_launched_ - num_settled_ > kMostOnTheirWay;
  };
  if (!is_sharded() || !is_full() || bucket_of(param_idx).has_memory()) return;
  settle_finished();
  if (!is_full()) return;
  const int oldest = num_settled_;
  const comm::WorkPtr work =
      is_stream_ordered() ? announced_[oldest] : buckets_[oldest]->work();
  lock.unlock();
  const bool is_done = finishes_within(*work, room_patience_);
  lock.lock();
  room_patience_ = is_done
                       ? std::min(2 * room_patience_, kLongestRoomPatience)
                       : std::max(room_patience_ / 2, kShortestRoomPatience);
  if (!is_full()) return;
  if (!is_stream_ordered()) return settle_finished();
  if (is_done && num_settled_ == oldest) settle_next();
}

// With the lock: the host does not wait, or the operation is over.
void Reducer::settle_next() {
  BucketReduction& bucket = *buckets_[num_settled_];
  comm::follow(*bucket.work(), options_.patience, bucket.group(),
               "reduction of a bucket");
  bucket.settle();
  ++num_settled_;
}

// Moves sums on that need their ranks for it, and takes back the memory of
// buckets that have been summed meanwhile; they end in the order of their
// launch.
void Reducer::settle_finished() {
  while (num_settled_ < num_launched_ &&
         buckets_[num_settled_]->work()->done()) {
    settle_next();
  }
}

void Reducer::settle_all(Lock& lock) {
  for (; num_settled_ < num_launched_; ++num_settled_) {
    await(num_settled_, lock);
    buckets_[num_settled_]->settle();
  }
}

// The lock is not held meanwhile; nothing changes, because no gradient is
// accepted any more.
void Reducer::await(int bucket_idx, Lock& lock) const {
  const BucketReduction& bucket = *buckets_[bucket_idx];
  const comm::WorkPtr work = bucket.work();
  if (!work) return;
  lock.unlock();
  comm::follow(*work, options_.patience, bucket.group(),
               detail::concat("reduction of bucket ", bucket_idx, " of ",
                              buckets_.size()));
  lock.lock();
}

}  // namespace smp::gradients
