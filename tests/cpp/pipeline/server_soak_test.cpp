// Tests that nothing grows over many steps.

#include <ATen/ops/sum.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <limits>

#include "tests/cpp/pipeline/server_ranks.h"

namespace smp::pipeline {
namespace {

constexpr int kWindow = 200;  // steps between two looks; the first one warms up
constexpr int kWindows = 5;
constexpr int kMicrobatchesOfSoak = 4;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCountsMemory = false;  // freed memory is kept for a while
#else
constexpr bool kCountsMemory = true;
#endif

// Growth in one window that may be noise. A leak grows in each window; a thread
// that comes late, because the machine is busy, keeps some memory for its next
// requests once.
constexpr int64_t kNoiseBytes = 1 << 18;

TEST(Soak, a_thousand_steps_leave_no_records_threads_or_memory) {
  constexpr int kSize = 3;
  // Up to one per body in flight, and one per request.
  constexpr int kMaxThreads = 2 * kMicrobatchesOfSoak + 2;
  std::barrier between_steps(kSize);
  int64_t bytes_before = 0;
  int64_t least_growth = std::numeric_limits<int64_t>::max();
  const auto body = [&](Rank& self) {
    for (int step = 1; step <= kWindows * kWindow; ++step) {
      self.step_of_chains(kMicrobatchesOfSoak);
      self.expect_empty();
      if (step % kWindow != 0) continue;
      EXPECT_LE(self.server->num_threads(), kMaxThreads);
      between_steps.arrive_and_wait();  // all ranks are still
      if (self.rank == 0) {
        const auto bytes = static_cast<int64_t>(mallinfo2().uordblks);
        if (step > kWindow) {
          least_growth = std::min(least_growth, bytes - bytes_before);
        }
        bytes_before = bytes;
      }
      between_steps.arrive_and_wait();
    }
  };
  run_servers({.size = kSize, .has_shared_memory = true}, body,
              std::chrono::minutes(4));
  if (kCountsMemory) {
    EXPECT_LT(least_growth, kNoiseBytes);
  }
}

}  // namespace
}  // namespace smp::pipeline
