#include "tests/cpp/lanes/fake_times.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/monotonic_clock.h"

namespace smp::lanes {
namespace {

using std::chrono::microseconds;

constexpr const char* kLanesVariable = "SMP_TEST_LANES";
constexpr std::string_view kRingWord = ":ring";
constexpr std::string_view kMeetWord = ":meet";
// Longer copies look like ranks that hang.
constexpr int64_t kMaxCopyUs = 1'000'000;
constexpr int64_t kMaxSlots = 1'000'000;
constexpr std::chrono::milliseconds kLookForFault{20};

// Source: splitmix64 (public domain, S. Vigna).
uint64_t next_random(uint64_t& state) {
  state += 0x9e3779b97f4a7c15ull;
  uint64_t value = state;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

}  // namespace

std::optional<FakeOptions> FakeOptions::from_environment() {
  const char* const text = std::getenv(kLanesVariable);
  if (text == nullptr || *text == 0) return std::nullopt;
  std::string_view rest = text;
  const bool has_meeting = rest.ends_with(kMeetWord);
  if (has_meeting) rest.remove_suffix(kMeetWord.size());
  const bool has_ring = rest.ends_with(kRingWord);
  if (has_ring) rest.remove_suffix(kRingWord.size());
  std::array<int64_t, 3> numbers{-1, -1, -1};
  const char* at = rest.data();
  const char* const end = at + rest.size();
  bool is_read = true;
  for (size_t i = 0; i < numbers.size() && is_read; ++i) {
    const auto one = std::from_chars(at, end, numbers[i]);
    is_read = one.ec == std::errc() && numbers[i] >= 0;
    at = one.ptr;
    if (i + 1 < numbers.size()) is_read = is_read && at != end && *at++ == ':';
  }
  SMP_CHECK_VALUE(is_read && at == end && numbers[1] <= kMaxCopyUs &&
                      numbers[2] >= 1 && numbers[2] <= kMaxSlots,
                  "environment variable ", kLanesVariable,
                  " must be '<seed>:<max_us>:<slots>', numbers >= 0 with at "
                  "most ",
                  kMaxCopyUs, " us and at least one slot, with or without '",
                  kRingWord, "' and '", kMeetWord, "' at the end; got '", text,
                  "'");
  return FakeOptions{.seed = static_cast<uint64_t>(numbers[0]),
                     .max_us = numbers[1],
                     .num_slots = static_cast<int>(numbers[2]),
                     .has_ring = has_ring,
                     .has_meeting = has_meeting};
}

CopyTimes::CopyTimes(const FakeOptions& options, int global_rank)
    : max_us_(options.max_us),
      num_ending_(options.num_ending),
      random_(options.seed * 1'000'003 + static_cast<uint64_t>(global_rank)) {}

std::optional<microseconds> CopyTimes::next() {
  if (num_ending_ >= 0 && num_copies_++ >= num_ending_) return std::nullopt;
  const auto limit = static_cast<uint64_t>(max_us_) + 1;
  // Half of them at once: uneven times make more orders than uniform ones.
  return microseconds(
      next_random(random_) % 2 == 0 ? 0 : next_random(random_) % limit);
}

LateEvent::LateEvent(std::shared_ptr<health::FaultBoard> faults)
    : faults_(std::move(faults)) {}

void LateEvent::block(const c10::Stream& /*stream*/) const {
  std::unique_lock lock(mutex_);
  while (!is_over_) {
    SMP_CHECK(!is_dropped_,
              "a tensor from another rank will not come any more: its lane is "
              "closed");
    changed_.wait_for(lock, kLookForFault);
    if (!is_over_) faults_->raise_if_faulted();
  }
}

bool LateEvent::is_over() const {
  std::lock_guard lock(mutex_);
  return is_over_;
}

int64_t LateEvent::over_ns() const {
  std::lock_guard lock(mutex_);
  return is_over_ ? over_ns_ : 0;
}

void LateEvent::end() {
  {
    std::lock_guard lock(mutex_);
    over_ns_ = monotonic_ns();
  }
  set(is_over_);
}

void LateEvent::set(bool& what) {
  {
    std::lock_guard lock(mutex_);
    what = true;
  }
  changed_.notify_all();
}

void fill_with_nonsense(const at::Tensor& tensor) {
  const int byte = tensor.scalar_type() == at::kBool ? 1 : 0xff;
  if (tensor.nbytes() > 0) {
    std::memset(tensor.mutable_data_ptr(), byte, tensor.nbytes());
  }
}

}  // namespace smp::lanes
