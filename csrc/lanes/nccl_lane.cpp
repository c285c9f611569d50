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

constexpr int64_t kNumTried = 16;
// Time for copies in flight when a run ends without a fault.
constexpr std::chrono::seconds kLastMeetings{2};
constexpr std::chrono::milliseconds kLookEvery{1};

// Returns numbers to send over a way as a test; no other way carries them.
at::Tensor tried_numbers(const Way& way, c10::Device device) {
  const int64_t first =
      (int64_t{way.src} * 100'003 + way.dst) * 1'009 + way.index * kNumTried;
  return at::arange(first, first + kNumTried,
                    at::TensorOptions(at::kLong).device(device));
}

std::string words_of(const Way& way) {
  return detail::concat("way ", way.index, " from global_rank ", way.src,
                        " to global_rank ", way.dst);
}

}  // namespace

NcclLane::NcclLane(std::unique_ptr<MeetingCopies> copies, WayOptions options,
                   c10::Device device, int global_rank,
                   std::shared_ptr<health::FaultBoard> faults)
    : copies_(std::move(copies)),
      options_(options),
      device_(device),
      global_rank_(global_rank),
      faults_(std::move(faults)),
      num_ways_(options.num_ways) {
  SMP_CHECK_VALUE(options.num_ways > 0,
                  "a pair of ranks needs at least one way, got ",
                  options.num_ways);
}

NcclLane::~NcclLane() { stop(); }

// ------------------------------------------------------------- the agreement

void NcclLane::fit_ways(int most_peers) {
  SMP_ASSERT(most_peers > 0 && 2 * most_peers <= kMostWays, most_peers,
             " peers");
  num_ways_ = std::min(options_.num_ways, kMostWays / (2 * most_peers));
}

std::string NcclLane::offer(const std::vector<int>& peers) {
  std::vector<Way> ways;
  for (const int peer : peers) {
    for (int index = 0; index < num_ways_; ++index) {
      ways.push_back({peer, global_rank_, index});
      ways.push_back({global_rank_, peer, index});
    }
  }
  return copies_->offer(ways);
}

void NcclLane::open(int src, int dst, const std::string& offer_of_peer) {
  const at::AutoGradMode no_grad(false);
  for (int index = 0; index < num_ways_; ++index) {
    const Way way{src, dst, index};
    copies_->connect(way, offer_of_peer);
    try_way(way);
    const std::lock_guard lock(mutex_);
    ways_[way];
  }
  peers_.insert(src == global_rank_ ? dst : src);
}

void NcclLane::try_way(const Way& way) {
  const auto end = MeetingClock::now() + options_.timeout;
  const at::Tensor expected = tried_numbers(way, device_);
  if (way.src == global_rank_) {
    wait_for(copies_->send(way, expected), end);
    return;
  }
  MarkedTensor came = copies_->receive(way, expected.sizes(), at::kLong);
  wait_for(came.mark, end);
  SMP_CHECK(at::equal(std::move(came).use(), expected), words_of(way),
            " carries other numbers than were sent");
}

void NcclLane::wait_for(const Mark& mark, MeetingClock::time_point end) const {
  while (!mark.is_over()) {
    faults_->raise_if_faulted();
    SMP_CHECK(MeetingClock::now() < end, "nothing came over it within ",
              options_.timeout.count(), " ms");
    std::this_thread::sleep_for(kLookEvery);
  }
}

void NcclLane::use_only(const std::vector<int>& peers) {
  std::erase_if(peers_, [&](int peer) {
    return std::find(peers.begin(), peers.end(), peer) == peers.end();
  });
}

// ------------------------------------------------------------------- tensors

// Reserves a way whose last copy is over, for this thread.
std::optional<Way> NcclLane::take_way(int dst, int64_t& sequence) {
  const std::lock_guard lock(mutex_);
  for (int index = 0; index < num_ways_; ++index) {
    const Way way{global_rank_, dst, index};
    State& state = ways_[way];
    if (state.is_asking || !state.end.is_over()) continue;
    state.is_asking = true;
    sequence = next_sequence_[dst]++;
    return way;
  }
  return std::nullopt;
}

void NcclLane::set_end(const Way& way, const Mark& end) {
  const std::lock_guard lock(mutex_);
  ways_[way] = {end, false};
}

std::optional<Posted> NcclLane::post(int dst, const at::Tensor& source,
                                     bool is_stable) {
  const at::AutoGradMode no_grad(false);
  if (!reaches(dst) || stopped_) return std::nullopt;
  Posted posted;
  int64_t sequence = 0;
  const std::optional<Way> way = take_way(dst, sequence);
  if (!way) return std::nullopt;
  const at::Tensor data = own_plain_tensor(source, is_stable);
  // The message does not wait for this mark, which ends after the message has
  // come.
  posted.end = copies_->send(*way, data);
  set_end(*way, posted.end);
  posted.descriptor = {.lane = LaneKind::kNccl,
                       .slot = way->index,
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
  SMP_CHECK(reaches(src) && descriptor.slot >= 0 && descriptor.slot < num_ways_,
            "global_rank ", src, " has sent a tensor over way ",
            descriptor.slot, " to global_rank ", global_rank_,
            ", which does not have it; ranks that run different versions of "
            "smp cannot work together");
  arrivals_.check(src, descriptor);
  const Way way{src, global_rank_, descriptor.slot};
  // A copy that was cut off never ends, so its tensor gets a mark that throws.
  if (stopped_) {
    return {at::empty(descriptor.sizes,
                      at::TensorOptions(descriptor.dtype).device(device_)),
            never()};
  }
  MarkedTensor result =
      copies_->receive(way, descriptor.sizes, descriptor.dtype);
  set_end(way, result.mark);
  return result;
}

void NcclLane::acknowledge(int src, const Receipt& receipt) {
  SMP_CHECK(false, "global_rank ", src, " gave back way ", receipt.slot,
            " of NCCL, which nobody gives back");
}

// ------------------------------------------------------------------- the end

bool NcclLane::all_over() const {
  const std::lock_guard lock(mutex_);
  try {
    return std::all_of(ways_.begin(), ways_.end(), [](const auto& one) {
      return !one.second.is_asking && one.second.end.is_over();
    });
  } catch (const std::exception&) {
    return false;  // a device that has failed
  }
}

void NcclLane::stop() {
  if (stopped_.exchange(true)) return;
  const auto give_up = MeetingClock::now() + kLastMeetings;
  while (!all_over() && !faults_->fault() && MeetingClock::now() < give_up) {
    std::this_thread::sleep_for(kLookEvery);
  }
  copies_->stop();
}

}  // namespace smp::lanes
