#include "csrc/lanes/nccl_lane.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/health/thread_name.h"
#include "csrc/lanes/never_event.h"
#include "csrc/lanes/plain_tensor.h"
#include "csrc/memory/device_scope.h"

namespace smp::lanes {
namespace {

using memory::Mark;
using memory::MarkedTensor;
using MeetingClock = std::chrono::steady_clock;

constexpr int64_t kNumTestNumbers = 16;
// Time for copies in flight when a run ends without a fault.
constexpr std::chrono::seconds kLastMeetings{2};
constexpr std::chrono::milliseconds kPollEvery{1};
constexpr std::chrono::milliseconds kLookForFaultEvery{20};

// Returns numbers to send over a channel as a test; no other channel carries
// them.
at::Tensor test_numbers(const CopyChannel& channel, c10::Device device) {
  const int64_t first = (int64_t{channel.src} * 100'003 + channel.dst) * 1'009 +
                        channel.index * kNumTestNumbers;
  return at::arange(first, first + kNumTestNumbers,
                    at::TensorOptions(at::kLong).device(device));
}

std::string describe(const CopyChannel& channel) {
  return detail::concat("channel ", channel.index, " from global_rank ",
                        channel.src, " to global_rank ", channel.dst);
}

// The beginning of a turn, for a message that leaves then.
class TurnBegin final : public Mark::Event {
 public:
  void begin() { has_begun_ = true; }
  void block(const c10::Stream& /*stream*/) const override {
    SMP_ASSERT(false, "a turn is no work of a stream");
  }
  bool is_over() const override { return has_begun_; }

 private:
  std::atomic<bool> has_begun_{false};
};

}  // namespace

// The end of a sending that is enqueued later.
class NcclLane::SendEnd final : public Mark::Event {
 public:
  explicit SendEnd(std::shared_ptr<health::FaultBoard> faults)
      : faults_(std::move(faults)) {}

  /// Forgets all callers of `when_recorded`.
  void drop() {
    const std::lock_guard lock(mutex_);
    calls_.clear();
  }
  void set(const Mark& end) {
    std::vector<std::function<void()>> calls;
    {
      const std::lock_guard lock(mutex_);
      end_ = end;
      calls.swap(calls_);
    }
    for (const auto& call : calls) call();
  }

  // Waits on the host until the sending is enqueued.
  void block(const c10::Stream& stream) const override {
    std::optional<Mark> end = get();
    for (; !end; end = get()) {
      faults_->raise_if_faulted();
      std::this_thread::sleep_for(kPollEvery);
    }
    end->block(stream);
  }
  bool is_over() const override {
    const std::optional<Mark> end = get();
    return end && end->is_over();
  }
  int64_t over_ns() const override {
    const std::optional<Mark> end = get();
    return end ? end->over_ns() : 0;
  }
  void when_recorded(const std::function<void()>& call) const override {
    {
      const std::lock_guard lock(mutex_);
      if (!end_) {
        calls_.push_back(call);
        return;
      }
    }
    call();
  }

 private:
  std::optional<Mark> get() const {
    const std::lock_guard lock(mutex_);
    return end_;
  }

  const std::shared_ptr<health::FaultBoard> faults_;
  mutable std::mutex mutex_;  // guards all that follows
  std::optional<Mark> end_;   // none: not enqueued
  mutable std::vector<std::function<void()>> calls_;
};

NcclLane::NcclLane(std::unique_ptr<MeetingCopies> copies,
                   ChannelOptions options, c10::Device device, int global_rank,
                   std::shared_ptr<health::FaultBoard> faults,
                   SendReceipt receipts)
    : copies_(std::move(copies)),
      options_(options),
      device_(device),
      global_rank_(global_rank),
      faults_(std::move(faults)),
      num_channels_(options.num_channels),
      receipts_(std::move(receipts)),
      sending_(device),
      turns_(global_rank) {
  SMP_CHECK_VALUE(options.num_channels > 0,
                  "a pair of ranks needs at least one channel, got ",
                  options.num_channels);
}

NcclLane::~NcclLane() { stop(); }

// ------------------------------------------------------------- the agreement

void NcclLane::limit_channels(int max_peers) {
  SMP_ASSERT(max_peers > 0 && 2 * max_peers <= kMaxChannels, max_peers,
             " peers");
  num_channels_ =
      std::min(options_.num_channels, kMaxChannels / (2 * max_peers));
}

std::string NcclLane::offer(const std::vector<int>& peers) {
  std::vector<CopyChannel> channels;
  for (const int peer : peers) {
    for (int index = 0; index < num_channels_; ++index) {
      channels.push_back({peer, global_rank_, index});
      channels.push_back({global_rank_, peer, index});
    }
  }
  return copies_->offer(channels);
}

void NcclLane::open(int src, int dst, const std::string& offer_of_peer) {
  const at::AutoGradMode no_grad(false);
  for (int index = 0; index < num_channels_; ++index) {
    const CopyChannel channel{src, dst, index};
    copies_->connect(channel, offer_of_peer);
    test_channel(channel);
    const std::lock_guard lock(mutex_);
    channels_[channel];
  }
  peers_.insert(src == global_rank_ ? dst : src);
}

void NcclLane::test_channel(const CopyChannel& channel) {
  const auto end = MeetingClock::now() + options_.timeout;
  const at::Tensor expected = test_numbers(channel, device_);
  if (channel.src == global_rank_) {
    wait_for(copies_->send(channel, expected), end);
    return;
  }
  MarkedTensor came = copies_->receive(channel, expected.sizes(), at::kLong);
  wait_for(came.mark, end);
  SMP_CHECK(at::equal(std::move(came).use(), expected), describe(channel),
            " carries other numbers than were sent");
}

void NcclLane::wait_for(const Mark& mark, MeetingClock::time_point end) const {
  while (!mark.is_over()) {
    faults_->raise_if_faulted();
    SMP_CHECK(MeetingClock::now() < end, "nothing came over it within ",
              options_.timeout.count(), " ms");
    std::this_thread::sleep_for(kPollEvery);
  }
}

void NcclLane::use_only(const std::vector<int>& peers) {
  std::erase_if(peers_, [&](int peer) {
    return std::find(peers.begin(), peers.end(), peer) == peers.end();
  });
}

// ------------------------------------------------------------------- tensors

// Returns a channel whose last copy is over.
std::optional<CopyChannel> NcclLane::find_channel_locked(int dst) {
  for (int index = 0; index < num_channels_; ++index) {
    const CopyChannel channel{global_rank_, dst, index};
    if (channels_[channel].end.is_over()) return channel;
  }
  return std::nullopt;
}

std::optional<Posted> NcclLane::post(int dst, const at::Tensor& source,
                                     bool is_stable) {
  const at::AutoGradMode no_grad(false);
  if (!reaches(dst) || stopped_) return std::nullopt;
  std::unique_lock lock(mutex_);
  const std::optional<CopyChannel> channel = find_channel_locked(dst);
  if (!channel) return std::nullopt;
  const auto end = std::make_shared<SendEnd>(faults_);
  State& state = channels_[*channel];
  state = {.end = Mark(end), .sequence = next_sequence_[dst]++};
  lock.unlock();  // reserved by an end that is not over
  const at::Tensor data = own_plain_tensor(source, is_stable);
  Posted posted;
  posted.end = state.end;
  posted.descriptor = {.lane = LaneKind::kNccl,
                       .slot = channel->index,
                       .sequence = state.sequence,
                       .num_bytes = static_cast<int64_t>(data.nbytes()),
                       .dtype = data.scalar_type(),
                       .sizes = data.sizes().vec()};
  const auto stream = memory::current_stream(device_);
  const Mark made = stream ? Mark::record(*stream) : Mark::none();
  lock.lock();
  if (stopped_) return std::nullopt;
  state.sending = {data, made, end};
  if (!sender_.joinable()) sender_ = std::thread([this] { send_asked(); });
  return posted;
}

Mark NcclLane::ask_to_leave(int dst, int num_tensors) {
  const auto turn = std::make_shared<TurnBegin>();
  const std::lock_guard lock(mutex_);
  turns_.add_message(dst, num_tensors, [turn] { turn->begin(); });
  return turn->is_over() ? Mark::none() : Mark(turn);
}

// ----------------------------------------------------- the thread that sends

void NcclLane::send_asked() {
  health::name_this_thread("smp-sends");
  memory::enter_device(device_);
  const at::AutoGradMode no_grad(false);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_ending_ || !ready_.empty(); });
    if (is_ending_) return;
    const CopyChannel channel = ready_.front();
    ready_.pop_front();
    lock.unlock();
    try {
      send_now(channel);
    } catch (const std::exception& error) {
      lock.lock();
      if (is_ending_) return;  // `stop` has cut it off
      faults_->report({.kind = health::Fault::Kind::kRaised,
                       .global_rank = global_rank_,
                       .where = "the sending thread of NCCL's lane",
                       .text = error.what()});
      return;
    }
    lock.lock();
  }
}

void NcclLane::send_now(const CopyChannel& channel) {
  Sending sending;
  int64_t sequence = 0;
  {
    const std::lock_guard lock(mutex_);
    State& state = channels_[channel];
    sending = std::exchange(state.sending, {});
    sequence = state.sequence;
  }
  sending_.wait(sending.made);
  Mark end;
  sending_.run_alone([&] { end = copies_->send(channel, sending.data); });
  // The receipt leaves before the channel is free, whose next message must not
  // overtake it.
  if (channel.dst < global_rank_) {
    receipts_(channel.dst, {LaneKind::kNccl, channel.index, sequence});
  }
  sending.end->set(end);
  {
    const std::lock_guard lock(mutex_);
    turns_.sent();
  }
  changed_.notify_all();
}

// --------------------------------------------------------- the receiver's side

at::Tensor NcclLane::new_payload(const Descriptor& /*descriptor*/) const {
  return {};
}

MarkedTensor NcclLane::take(int src, const Descriptor& descriptor,
                            at::Tensor /*payload*/) {
  const at::AutoGradMode no_grad(false);
  SMP_CHECK(
      reaches(src) && descriptor.slot >= 0 && descriptor.slot < num_channels_,
      "global_rank ", src, " has sent a tensor over channel ", descriptor.slot,
      " to global_rank ", global_rank_,
      ", which does not have it; ranks that run different versions of "
      "smp cannot work together");
  arrivals_.check(src, descriptor);
  const CopyChannel channel{src, global_rank_, descriptor.slot};
  // A copy that was cut off never ends, so its tensor gets a mark that throws.
  if (!begin_receive(src)) {
    return {at::empty(descriptor.sizes,
                      at::TensorOptions(descriptor.dtype).device(device_)),
            never()};
  }
  MarkedTensor result =
      copies_->receive(channel, descriptor.sizes, descriptor.dtype);
  {
    const std::lock_guard lock(mutex_);
    channels_[channel] = {.end = result.mark, .sequence = descriptor.sequence};
  }
  receipts_(src, {LaneKind::kNccl, descriptor.slot, descriptor.sequence});
  {
    const std::lock_guard lock(mutex_);
    turns_.received(src);
  }
  changed_.notify_all();
  return result;
}

// Waits for this rank's turn. @return false if the lane was stopped
bool NcclLane::begin_receive(int src) {
  std::unique_lock lock(mutex_);
  if (stopped_) return false;
  const auto turn = std::make_shared<TurnBegin>();
  turns_.add_receive(src, [turn] { turn->begin(); });
  while (!turn->is_over() && !stopped_) {
    changed_.wait_for(lock, kLookForFaultEvery);
    if (!turn->is_over()) faults_->raise_if_faulted();
  }
  return turn->is_over();
}

void NcclLane::acknowledge(int src, const Receipt& receipt) {
  {
    const std::lock_guard lock(mutex_);
    if (is_ending_) return;
    const auto found =
        channels_.find(turns_.is_sent_receipt(src)
                           ? CopyChannel{src, global_rank_, receipt.slot}
                           : CopyChannel{global_rank_, src, receipt.slot});
    SMP_CHECK(found != channels_.end() &&
                  found->second.sequence == receipt.sequence &&
                  !std::exchange(found->second.has_receipt, true),
              "global_rank ", src, " sent a receipt of tensor ",
              receipt.sequence, " of channel ", receipt.slot,
              " of NCCL, which is not expected; ranks that run different "
              "versions of smp cannot work together");
    turns_.add_receipt(
        src, [this, channel = found->first] { ready_.push_back(channel); });
  }
  changed_.notify_all();
}

// ------------------------------------------------------------------- the end

bool NcclLane::all_over() const {
  const std::lock_guard lock(mutex_);
  try {
    return std::all_of(channels_.begin(), channels_.end(), [](const auto& one) {
      return one.second.end.is_over();
    });
  } catch (const std::exception&) {
    return false;  // a device that has failed
  }
}

void NcclLane::stop() {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_.exchange(true)) return;
    turns_.drop_own();
  }
  changed_.notify_all();  // a `take` that waits for its turn
  const auto give_up = MeetingClock::now() + kLastMeetings;
  while (!all_over() && !faults_->fault() && MeetingClock::now() < give_up) {
    std::this_thread::sleep_for(kPollEvery);
  }
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  copies_->stop();  // ends a `send` that is blocked
  if (sender_.joinable()) sender_.join();
  const std::lock_guard lock(mutex_);
  for (auto& [channel, state] : channels_) {
    if (state.sending.end) state.sending.end->drop();
    state.sending = {};
  }
}

}  // namespace smp::lanes
