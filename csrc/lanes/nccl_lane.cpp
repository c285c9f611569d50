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
#include "csrc/lanes/never_event.h"
#include "csrc/lanes/plain_tensor.h"

namespace smp::lanes {
namespace {

using memory::Mark;
using memory::MarkedTensor;
using MeetingClock = std::chrono::steady_clock;

constexpr int64_t kNumTestNumbers = 16;
// Time for copies in flight when a run ends without a fault.
constexpr std::chrono::seconds kLastMeetings{2};
constexpr std::chrono::milliseconds kPollEvery{1};

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

}  // namespace

NcclLane::NcclLane(std::unique_ptr<MeetingCopies> copies,
                   ChannelOptions options, c10::Device device, int global_rank,
                   std::shared_ptr<health::FaultBoard> faults)
    : copies_(std::move(copies)),
      options_(options),
      device_(device),
      global_rank_(global_rank),
      faults_(std::move(faults)),
      num_channels_(options.num_channels) {
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

// Reserves a channel whose last copy is over, for this thread.
std::optional<CopyChannel> NcclLane::reserve_channel(int dst,
                                                     int64_t& sequence) {
  const std::lock_guard lock(mutex_);
  for (int index = 0; index < num_channels_; ++index) {
    const CopyChannel channel{global_rank_, dst, index};
    State& state = channels_[channel];
    if (state.is_enqueuing || !state.end.is_over()) continue;
    state.is_enqueuing = true;
    sequence = next_sequence_[dst]++;
    return channel;
  }
  return std::nullopt;
}

void NcclLane::set_end(const CopyChannel& channel, const Mark& end) {
  const std::lock_guard lock(mutex_);
  channels_[channel] = {end, false};
}

std::optional<Posted> NcclLane::post(int dst, const at::Tensor& source,
                                     bool is_stable) {
  const at::AutoGradMode no_grad(false);
  if (!reaches(dst) || stopped_) return std::nullopt;
  Posted posted;
  int64_t sequence = 0;
  const std::optional<CopyChannel> channel = reserve_channel(dst, sequence);
  if (!channel) return std::nullopt;
  const at::Tensor data = own_plain_tensor(source, is_stable);
  // The message does not wait for this mark, which ends after the message has
  // come.
  posted.end = copies_->send(*channel, data);
  set_end(*channel, posted.end);
  posted.descriptor = {.lane = LaneKind::kNccl,
                       .slot = channel->index,
                       .sequence = sequence,
                       .num_bytes = static_cast<int64_t>(data.nbytes()),
                       .dtype = data.scalar_type(),
                       .sizes = data.sizes().vec()};
  return posted;
}

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
  if (stopped_) {
    return {at::empty(descriptor.sizes,
                      at::TensorOptions(descriptor.dtype).device(device_)),
            never()};
  }
  MarkedTensor result =
      copies_->receive(channel, descriptor.sizes, descriptor.dtype);
  set_end(channel, result.mark);
  return result;
}

void NcclLane::acknowledge(int src, const Receipt& receipt) {
  SMP_CHECK(false, "global_rank ", src, " gave back channel ", receipt.slot,
            " of NCCL, which nobody gives back");
}

// ------------------------------------------------------------------- the end

bool NcclLane::all_over() const {
  const std::lock_guard lock(mutex_);
  try {
    return std::all_of(channels_.begin(), channels_.end(), [](const auto& one) {
      return !one.second.is_enqueuing && one.second.end.is_over();
    });
  } catch (const std::exception&) {
    return false;  // a device that has failed
  }
}

void NcclLane::stop() {
  if (stopped_.exchange(true)) return;
  const auto give_up = MeetingClock::now() + kLastMeetings;
  while (!all_over() && !faults_->fault() && MeetingClock::now() < give_up) {
    std::this_thread::sleep_for(kPollEvery);
  }
  copies_->stop();
}

}  // namespace smp::lanes
