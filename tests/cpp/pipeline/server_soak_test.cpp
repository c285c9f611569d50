// Nothing grows over many steps.

#include <ATen/ops/sum.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <barrier>

#include "tests/cpp/pipeline/server_ranks.h"

namespace smp::pipeline {
namespace {

constexpr int kSteps = 1000;
constexpr int kWarm = 200;
constexpr int kMicrobatches = 4;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCountsMemory = false;  // freed memory is kept for a while
#else
constexpr bool kCountsMemory = true;
#endif

// A cell that a thread's allocator keeps for its next request counts as used.
constexpr int64_t kNoiseBytes = 1 << 20;

TEST(Soak, a_thousand_steps_leave_no_records_threads_or_memory) {
  constexpr int kSize = 3;
  // Up to one per body in flight, and one per request.
  constexpr int kMaxThreads = 2 * kMicrobatches + 2;
  std::barrier between_steps(kSize);
  int64_t bytes_when_warm = 0;
  const auto body = [&](Rank& self) {
    for (int step = 0; step < kSteps; ++step) {
      self.step_of_chains(kMicrobatches);
      self.expect_empty();
      if (step != kWarm && step != kSteps - 1) continue;
      EXPECT_LE(self.server->num_threads(), kMaxThreads);
      between_steps.arrive_and_wait();  // all ranks are still
      if (self.rank == 0 && kCountsMemory) {
        const auto bytes = static_cast<int64_t>(mallinfo2().uordblks);
        if (step == kWarm) bytes_when_warm = bytes;
        EXPECT_LT(bytes - bytes_when_warm, kNoiseBytes);
      }
      between_steps.arrive_and_wait();
    }
  };
  run_servers({.size = kSize, .has_shared_memory = true}, body,
              std::chrono::minutes(4));
}

}  // namespace
}  // namespace smp::pipeline
