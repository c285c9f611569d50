#include "csrc/shm/collective_memory.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace smp::shm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

// Limits of spinning: about the time of a sleep and a wake, and that of a look
// when spinning does not pay.
constexpr nanoseconds kLongestSpin{60'000};
constexpr nanoseconds kShortestSpin{1'000};
constexpr std::chrono::milliseconds kLongestSleep{100};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

CollectiveMemory::CollectiveMemory(std::vector<std::shared_ptr<uint8_t>> areas,
                                   int group_rank)
    : areas_(std::move(areas)),
      group_rank_(group_rank),
      spin_time_(kLongestSpin) {}

void CollectiveMemory::begin(const CollectiveStamp& stamp) {
  ++num_collectives_;
  control(group_rank_).stamps[num_collectives_ % kNumStamps] = stamp;
}

const CollectiveStamp& CollectiveMemory::stamp_of(int group_rank) const {
  return control(group_rank).stamps[num_collectives_ % kNumStamps];
}

int CollectiveMemory::find_disagreement() const {
  for (int other = 0; other < size(); ++other) {
    if (stamp_of(other) != stamp_of(group_rank_)) return other;
  }
  return -1;
}

uint8_t* CollectiveMemory::slot(int group_rank) const {
  const auto index = static_cast<int64_t>(num_chunks_ % kNumSlots);
  return areas_[group_rank].get() + kDataOffset + index * 2 * kSlotBytes;
}

uint8_t* CollectiveMemory::input(int group_rank) const {
  return slot(group_rank);
}

uint8_t* CollectiveMemory::result(int group_rank) const {
  return slot(group_rank) + kSlotBytes;
}

void CollectiveMemory::arrive() {
  control(group_rank_).num_arrivals.store(++num_arrivals_);
  for (int other = 0; other < size(); ++other) {
    if (other != group_rank_) control(other).bell.ring();
  }
}

bool CollectiveMemory::have_arrived() const {
  for (int other = 0; other < size(); ++other) {
    if (control(other).num_arrivals.load() < num_arrivals_) return false;
  }
  return true;
}

bool CollectiveMemory::spin() {
  const Clock::time_point end = Clock::now() + spin_time_;
  do {
    for (int i = 0; i < 8; ++i) {
      if (have_arrived()) return true;
      pause();
    }
  } while (Clock::now() < end);
  // A late rank may need this core.
  std::this_thread::yield();
  return have_arrived();
}

void CollectiveMemory::sleep_until_arrival(Clock::time_point deadline) {
  if (spin()) {
    spin_time_ = std::min(2 * spin_time_, kLongestSpin);
    return;
  }
  spin_time_ = std::max(spin_time_ / 2, kShortestSpin);
  Doorbell& bell = control(group_rank_).bell;
  const uint32_t seen = bell.prepare();
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  if (!have_arrived() && left.count() > 0) {
    bell.sleep(Doorbell::Seat::kFirst, seen, std::min(left, kLongestSleep));
  }
  bell.cancel();
}

}  // namespace smp::shm
