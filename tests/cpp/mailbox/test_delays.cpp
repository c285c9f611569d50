#include "tests/cpp/mailbox/test_delays.h"

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "csrc/common/check.h"

namespace smp::mailbox {
namespace {

constexpr const char* kDelaysVariable = "SMP_TEST_DELAYS";
// Longer ones look like ranks that hang.
constexpr int64_t kMaxUs = 1'000'000;

// Source: splitmix64 (public domain, S. Vigna).
uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

void read_environment() {
  const char* const text = std::getenv(kDelaysVariable);
  if (text == nullptr || *text == 0) return;
  const char* const end = text + std::strlen(text);
  uint64_t seed = 0;
  int64_t max_us = -1;
  const auto first = std::from_chars(text, end, seed);
  bool is_read =
      first.ec == std::errc() && first.ptr != end && *first.ptr == ':';
  if (is_read) {
    const auto second = std::from_chars(first.ptr + 1, end, max_us);
    is_read = second.ec == std::errc() && second.ptr == end;
  }
  SMP_CHECK_VALUE(is_read && max_us >= 0 && max_us <= kMaxUs,
                  "environment variable ", kDelaysVariable,
                  " must be '<seed>:<max_us>', two numbers >= 0, the second at "
                  "most ",
                  kMaxUs, "; got '", text, "'");
  TestDelays::set(seed, max_us);
}

}  // namespace

std::atomic<uint64_t> TestDelays::seed_{0};
std::atomic<int64_t> TestDelays::max_us_{0};

TestDelays::TestDelays(int global_rank)
    : global_rank_(static_cast<uint64_t>(global_rank)) {
  read_environment();
}

void TestDelays::set(uint64_t seed, int64_t max_us) {
  SMP_CHECK_VALUE(max_us >= 0 && max_us <= kMaxUs, "a delay must be 0 to ",
                  kMaxUs, " microseconds, got ", max_us);
  seed_ = seed;
  max_us_ = max_us;
}

void TestDelays::sleep(PausePlace place) {
  const auto place_idx = static_cast<uint64_t>(place);
  const uint64_t count = num_pauses_.at(place_idx).fetch_add(1);
  uint64_t random = mixed(seed_.load());
  for (const uint64_t part : {global_rank_, place_idx, count}) {
    random = mixed(random ^ part);
  }
  // Most messages go through at once: uneven times make more orders than
  // uniform ones.
  if (random % 10 >= 3) return;
  const auto limit = static_cast<uint64_t>(max_us_.load()) + 1;
  std::this_thread::sleep_for(std::chrono::microseconds(mixed(random) % limit));
}

}  // namespace smp::mailbox
