#include "csrc/gradients/reduction_round.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>

#include "csrc/common/check.h"

namespace smp::gradients {
namespace {

constexpr std::chrono::milliseconds kShortestRoomPatience{1};
constexpr int kMostOnTheirWay = 1;

// Returns whether an operation finishes within a time. An operation that failed
// is finished, too; code that needs its result gets the error.
bool finishes_within(comm::Work& work, std::chrono::milliseconds limit) {
  try {
    work.wait(limit);
  } catch (const Error&) {
    return work.done();
  }
  return true;
}

}  // namespace

void ReductionRound::begin_first(int num_microbatches, bool is_last_pass,
                                 bool are_shares) {
  num_microbatches_ = num_microbatches;
  round_idx_ = 0;
  is_last_pass_ = is_last_pass;
  are_shares_ = are_shares;
  num_hopped_ = 0;
  begin();
}

void ReductionRound::begin_next() {
  ++round_idx_;
  begin();
}

void ReductionRound::begin() {
  is_active_ = false;
  header_work_ = nullptr;
  announced_.clear();
  used_.clear();
  num_launched_ = num_settled_ = 0;
  for (const auto& bucket : buckets_) bucket->begin_round();
}

// Launches the header, always the first operation of a round, so that a rank
// without any gradient can find out whether others reduce something before it
// takes part. Where each microbatch is a round, the header also detects ranks
// that have more microbatches. The host reads it, hence it never lies on a
// device.
void ReductionRound::launch_header() {
  if (header_work_) return;
  std::vector<int64_t> words = {is_active_ ? 1 : 0};
  if (options_.every_microbatch()) {
    for (const int64_t word : {num_microbatches_, round_idx_}) {
      words.insert(words.end(), {word, -word});
    }
  }
  header_ = at::empty({static_cast<int64_t>(words.size())}, at::kLong);
  std::copy(words.begin(), words.end(), header_.mutable_data_ptr<int64_t>());
  header_work_ = groups_.control().all_reduce(header_, comm::ReduceOp::kMax);
}

void ReductionRound::launch_next(const std::vector<bool>& used) {
  SMP_CHECK(num_hopped_ == 0 || may_go_further(),
            "a gradient came behind the last microbatch of its step, when the "
            "sums over ",
            buckets_[num_launched_].group().name(),
            " had begun; call backward inside the step function");
  if (groups_.has_peers()) launch_header();
  buckets_[num_launched_].launch(pass_divisor());
  announce(used);
  ++num_launched_;
}

// Tells the hosts of other ranks that the next bucket was launched, where they
// wait for that.
void ReductionRound::announce(const std::vector<bool>& used) {
  if (options_.applies()) {
    const auto& slots = buckets_.plan().buckets[num_launched_].slots;
    at::Tensor flags = at::empty({std::ssize(slots)}, at::kLong);
    auto* flag = flags.mutable_data_ptr<int64_t>();
    for (const BucketSlot& slot : slots) *flag++ = used[slot.record_idx];
    used_.push_back(flags);
    if (!groups_.has_peers()) return;
    announced_.push_back(
        groups_.control().all_reduce(flags, comm::ReduceOp::kMax));
  } else if (options_.is_sharded() && groups_.is_stream_ordered()) {
    announced_.push_back(groups_.control().barrier());
  }
}

std::vector<bool> ReductionRound::used_anywhere(int bucket_idx) const {
  const at::Tensor& flags = used_[bucket_idx];
  const auto* first = flags.const_data_ptr<int64_t>();
  return std::vector<bool>(first, first + flags.numel());
}

void ReductionRound::launch_rest(const std::vector<bool>& used) {
  while (has_next()) launch_next(used);
}

bool ReductionRound::is_active_anywhere(Lock& lock) {
  if (!groups_.has_peers()) return is_active_;
  launch_header();
  lock.unlock();
  comm::wait_for(*header_work_, groups_.wait_options(), groups_.control(),
                 "begin of the reduction");
  lock.lock();
  const auto* words = header_.const_data_ptr<int64_t>();
  for (int64_t i = 1; i < header_.numel(); i += 2) {
    SMP_CHECK(words[i] == -words[i + 1], "the ranks of ", groups_.all()->name(),
              " are at different microbatches: between ", -words[i + 1],
              " and ", words[i], i == 1 ? " of them in a step" : " are over",
              "; where gradients are reduced after every microbatch, all ranks "
              "need equally many");
  }
  return words[0] != 0;
}

bool ReductionRound::is_full() const {
  return num_launched_ - num_settled_ > kMostOnTheirWay;
}

// Waits for the oldest sum, for a while. On a device the host does not wait for
// the sum but for the hosts of the other ranks: once all have launched it, it
// ends by itself, and work computed after it may take the memory. Earlier the
// device could wait for a rank that waits for the next work of this device.
ReductionRound::Waited ReductionRound::await_oldest(Lock& lock) {
  const int oldest = num_settled_;
  std::vector<comm::WorkPtr> works;
  if (!groups_.is_stream_ordered()) works.push_back(buckets_[oldest].work());
  if (!announced_.empty()) works.push_back(announced_[oldest]);
  lock.unlock();
  const bool is_over =
      std::all_of(works.begin(), works.end(), [this](const auto& work) {
        return finishes_within(*work, room_patience_);
      });
  lock.lock();
  // The wait is shorter after each failure.
  room_patience_ = is_over
                       ? std::min(2 * room_patience_, kLongestRoomPatience)
                       : std::max(room_patience_ / 2, kShortestRoomPatience);
  return {oldest, is_over};
}

void ReductionRound::settle(Waited waited) {
  if (!groups_.is_stream_ordered()) return settle_finished();
  if (waited.is_over && num_settled_ == waited.bucket_idx) settle_next();
}

// Settles the next bucket under the lock: the host does not wait, or the
// operation is over.
void ReductionRound::settle_next() {
  BucketReduction& bucket = buckets_[num_settled_];
  if (bucket.work()) {
    comm::follow(*bucket.work(), groups_.wait_options(), bucket.group(),
                 "reduction of a bucket");
  }
  bucket.settle();
  if (go_further(num_settled_)) ++num_early_hops_;
  ++num_settled_;
}

bool ReductionRound::may_go_further() const {
  if (!options_.is_sharded() || !is_last_pass_) return false;
  if (!groups_.has_peers() || groups_.is_stream_ordered()) return false;
  return !options_.every_microbatch() || round_idx_ == num_microbatches_ - 1;
}

// Begins a further sum. Buckets end in one order on all ranks, hence these sums
// begin in one order.
bool ReductionRound::go_further(int bucket_idx) {
  if (!may_go_further() || !buckets_[bucket_idx].launch_hop(0)) return false;
  ++num_hopped_;
  return true;
}

// Moves sums on that need their ranks for it, and takes back the memory of
// buckets that have been summed meanwhile; they end in the order of their
// launch.
void ReductionRound::settle_finished() {
  while (num_settled_ < num_launched_ && is_over(num_settled_)) settle_next();
}

bool ReductionRound::is_over(int bucket_idx) const {
  const comm::WorkPtr& work = buckets_[bucket_idx].work();
  const bool is_known = !options_.applies() || announced_.empty() ||
                        announced_[bucket_idx]->done();
  return is_known && (!work || work->done());
}

void ReductionRound::settle_all(Lock& lock) {
  for (; num_settled_ < num_launched_; ++num_settled_) {
    await(num_settled_, lock);
    buckets_[num_settled_].settle();
    go_further(num_settled_);
  }
}

void ReductionRound::reduce_further(Lock& lock) {
  for (int hop_idx = 0;; ++hop_idx) {
    const int num_begun = hop_idx == 0 ? num_hopped_ : 0;
    bool has_hop = num_begun > 0;
    for (int b = num_begun; b < buckets_.size(); ++b) {
      has_hop = buckets_[b].launch_hop(hop_idx) || has_hop;
    }
    if (!has_hop) return;
    for (int b = 0; b < buckets_.size(); ++b) {
      await(b, lock);
      buckets_[b].settle();
    }
  }
}

// Waits without the lock. Nothing changes meanwhile, because no gradient is
// accepted any more.
void ReductionRound::await(int bucket_idx, Lock& lock) const {
  const BucketReduction& bucket = buckets_[bucket_idx];
  const comm::WorkPtr work = bucket.work();
  if (!work) return;
  const std::string what = detail::concat("reduction of bucket ", bucket_idx,
                                          " of ", buckets_.size());
  const comm::WorkPtr known = options_.applies() && !announced_.empty()
                                  ? announced_[bucket_idx]
                                  : nullptr;
  lock.unlock();
  comm::follow(*work, groups_.wait_options(), bucket.group(), what);
  if (known) {
    comm::wait_for(*known, groups_.wait_options(), groups_.control(), what);
  }
  lock.lock();
}

}  // namespace smp::gradients
