#include "csrc/gradients/hooked_group.h"

#include <gtest/gtest.h>

#include <thread>

#include "csrc/common/check.h"
#include "tests/cpp/gradients/reducer_fixture.h"

namespace smp::gradients {
namespace {

// Sums the bucket on the group itself, in a thread of its own, times ten.
comm::WorkPtr sum_elsewhere(comm::Communicator& group, const at::Tensor& flat,
                            std::vector<std::thread>& threads) {
  at::Tensor copy = flat.clone();
  const comm::WorkPtr inner = group.all_reduce(copy, comm::ReduceOp::kSum);
  auto work = std::make_shared<PromisedWork>(
      [flat, copy] { flat.copy_(copy).mul_(10); });
  threads.emplace_back([inner, work] {
    inner->wait(std::chrono::seconds(10));
    work->complete();
  });
  return work;
}

TEST(HookedGroup, a_hook_sums_every_bucket_once_per_step_and_nothing_else) {
  comm::run_ranks(2, [&](int group_rank, const comm::CommunicatorPtr& dp) {
    std::vector<int> seen;
    std::vector<std::thread> threads;
    const auto hooked = std::make_shared<HookedGroup>(
        dp, [&](int bucket_idx, const at::Tensor& flat) {
          seen.push_back(bucket_idx);
          return sum_elsewhere(*dp, flat, threads);
        });
    Reducer::Options options = small_buckets();
    options.average_over_microbatches = false;
    Rank rank({{100}, {100}}, hooked, options);
    hooked->set_buckets({rank.reducer->flat(0), rank.reducer->flat(1)});
    for (int step = 0; step < 3; ++step) {
      rank.zero_grad();
      rank.reducer->begin_step(1);
      rank.contribute(1, 0, group_rank + 1);
      rank.contribute(0, 0, 2.0 * (group_rank + 1));
      rank.reducer->finish_microbatch(0);
      rank.reducer->end_step();
      // Records of two ranks divide by two; the hook multiplies by ten.
      EXPECT_EQ(rank.grad(1), 15);
      EXPECT_EQ(rank.grad(0), 30);
    }
    EXPECT_EQ(seen, (std::vector<int>{0, 1, 0, 1, 0, 1}));
    EXPECT_GT(rank.reducer->stats().num_early_buckets, 0);
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(HookedGroup, late_gradients_are_not_a_bucket) {
  comm::run_ranks(2, [&](int, const comm::CommunicatorPtr& dp) {
    std::vector<int> seen;
    const auto hooked = std::make_shared<HookedGroup>(
        dp, [&](int bucket_idx, const at::Tensor& flat) {
          seen.push_back(bucket_idx);
          return dp->all_reduce(flat, comm::ReduceOp::kSum);
        });
    Rank rank({{100}}, hooked, small_buckets());
    hooked->set_buckets({rank.reducer->flat(0)});
    for (const int num_uses : {1, 2}) {
      rank.zero_grad();
      rank.reducer->begin_step(1);
      for (int use = 0; use < num_uses; ++use) rank.contribute(0, 0, 1);
      rank.reducer->finish_microbatch(0);
      rank.reducer->end_step();
      EXPECT_EQ(rank.grad(0), num_uses);
    }
    EXPECT_EQ(seen, (std::vector<int>{0, 0, -1}));
  });
}

TEST(PromisedWork, finishes_once_and_only_after_it_is_complete) {
  int num_finished = 0;
  PromisedWork work([&] { ++num_finished; });
  EXPECT_FALSE(work.done());
  EXPECT_THROW(work.wait(std::chrono::milliseconds(1)), Error);
  EXPECT_EQ(num_finished, 0);
  work.complete();
  EXPECT_TRUE(work.done());
  work.wait(std::chrono::milliseconds(0));
  work.wait(std::chrono::milliseconds(0));
  EXPECT_EQ(num_finished, 1);
}

TEST(PromisedWork, an_error_comes_again_in_every_wait) {
  PromisedWork work([] { throw Error("of the hook"); });
  work.complete();
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(work.wait(std::chrono::milliseconds(0)), Error);
  }
}

TEST(PromisedWork, an_aborted_one_raises) {
  PromisedWork work([] {});
  work.abort();
  EXPECT_TRUE(work.done());
  EXPECT_THROW(work.wait(std::chrono::seconds(10)), Error);
}

}  // namespace
}  // namespace smp::gradients
