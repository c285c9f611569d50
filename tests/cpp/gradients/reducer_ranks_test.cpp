#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include "csrc/common/check.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/gradients/reducer_fixture.h"

namespace smp::gradients {
namespace {

// Each parameter fills a bucket of small_buckets().
const std::vector<std::vector<int64_t>> kFourBuckets(4, {100});

class ReducerRanks : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  Reducer::Options options() const {
    Reducer::Options options = small_buckets();
    options.overlap = std::get<1>(GetParam());
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(sizes_and_overlap, ReducerRanks,
                         testing::Combine(testing::Values(2, 4),
                                          testing::Bool()));

TEST_P(ReducerRanks, gradients_are_the_mean_over_ranks_and_microbatches) {
  comm::run_ranks(size(), [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Rank rank(kFourBuckets, dp, options());
    ASSERT_EQ(rank.reducer->plan().buckets.size(), 4u);
    for (int step = 0; step < 3; ++step) {
      rank.zero_grad();
      rank.reducer->begin_step(2);
      for (int mb = 0; mb < 2; ++mb) {
        for (int i = 3; i >= 0; --i) {
          rank.contribute(i, mb, (group_rank + 1) * (mb + 1) * (i + step));
        }
        rank.reducer->finish_microbatch(mb);
      }
      rank.reducer->end_step();
      for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(rank.grad(i), (size() + 1) * 0.5 * 1.5 * (i + step));
      }
    }
    // The first step learns; two of three can overlap.
    EXPECT_EQ(rank.reducer->stats().num_early_buckets,
              options().overlap ? 8 : 0);
    EXPECT_EQ(rank.reducer->stats().num_late_parameters, 0);
  });
}

TEST_P(ReducerRanks, a_parameter_used_on_one_rank_counts_on_all) {
  comm::run_ranks(size(), [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Rank rank(kFourBuckets, dp, options());
    for (int step = 0; step < 3; ++step) {
      rank.zero_grad();
      rank.reducer->begin_step(1);
      if (group_rank == step % size()) rank.contribute(2, 0, 6);
      if (step == 2) rank.contribute(0, 0, 1);
      rank.reducer->end_step();
      EXPECT_EQ(rank.grad(2), 6.0 / size()) << step;
      EXPECT_EQ(rank.has_grad(0), step == 2);
      EXPECT_FALSE(rank.has_grad(1));
    }
  });
}

TEST_P(ReducerRanks, late_gradients_are_reduced_in_a_second_round) {
  comm::run_ranks(size(), [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Rank rank(kFourBuckets, dp, options());
    // Rank 0 sees parameter 3 once more after the step from which it learns.
    for (int step = 0; step < 4; ++step) {
      rank.zero_grad();
      rank.reducer->begin_step(1);
      for (int i = 3; i >= 0; --i) rank.contribute(i, 0, group_rank + i);
      const bool extra = step == 1 && group_rank == 0;
      if (extra) rank.contribute(3, 0, 7);
      if (extra) rank.contribute(3, 0, 1);
      rank.reducer->end_step();
      const double mean = (size() - 1) * 0.5;
      EXPECT_EQ(rank.grad(3), mean + 3 + (step == 1 ? 8.0 / size() : 0));
      EXPECT_EQ(rank.grad(1), mean + 1);
    }
    const bool was_late = options().overlap && group_rank == 0;
    EXPECT_EQ(rank.reducer->stats().num_late_parameters, was_late ? 1 : 0);
  });
}

// Both parameters share a bucket; whether it is on its way when the second
// gradient of parameter 0 comes is a matter of timing.
TEST_P(ReducerRanks, rounding_does_not_depend_on_when_a_bucket_was_launched) {
  constexpr float kBig = 1 << 24;
  comm::run_ranks(size(), [&](int group_rank, const comm::CommunicatorPtr& dp) {
    std::vector<double> grads;
    for (const bool comes_last : {false, true}) {
      Rank rank({{10}, {10}}, dp, options());
      ASSERT_EQ(rank.reducer->plan().buckets.size(), 1u);
      for (int step = 0; step < 2; ++step) {
        rank.zero_grad();
        rank.reducer->begin_step(1);
        rank.contribute(0, 0, group_rank == 0 ? 1 : kBig);
        const bool extra = step == 1 && group_rank == 0;
        if (extra && !comes_last) rank.contribute(0, 0, -kBig);
        rank.contribute(1, 0, 1);
        if (extra && comes_last) rank.contribute(0, 0, -kBig);
        rank.reducer->end_step();
      }
      grads.push_back(rank.grad(0));
    }
    EXPECT_EQ(grads[0], grads[1]);
  });
}

TEST_P(ReducerRanks, ranks_that_learn_different_counts_stay_in_step) {
  comm::run_ranks(size(), [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Rank rank(kFourBuckets, dp, options());
    for (int step = 0; step < 8; ++step) {
      rank.zero_grad();
      rank.reducer->begin_step(2);
      for (int mb = 0; mb < 2; ++mb) {
        for (int k = 0; k < 4; ++k) {
          const int i = (k + group_rank) % 4;  // not even in the same order
          const int times = (group_rank + step * mb + i) % 3;
          for (int n = 0; n < times; ++n) rank.contribute(i, mb, 1);
        }
        rank.reducer->finish_microbatch(mb);
      }
      rank.reducer->end_step();
      for (int i = 0; i < 4; ++i) {
        double total = 0;
        for (int r = 0; r < size(); ++r) {
          for (int mb = 0; mb < 2; ++mb) total += (r + step * mb + i) % 3;
        }
        EXPECT_EQ(rank.has_grad(i), total > 0);
        if (total > 0) {
          EXPECT_NEAR(rank.grad(i), total / 2 / size(), 1e-6);
        }
      }
    }
  });
}

TEST_P(ReducerRanks, steps_add_up_and_passes_are_reduced_once) {
  Reducer::Options with_passes = options();
  with_passes.passes_per_reduction = 2;
  comm::run_ranks(size(), [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Rank rank({{100}, {100}}, dp, with_passes);
    const double mean = (size() + 1) * 0.5;
    for (int cycle = 0; cycle < 3; ++cycle) {  // never reset: they add up
      rank.reducer->begin_step(1);
      rank.contribute(0, 0, group_rank + 1);
      rank.reducer->end_step();
      EXPECT_EQ(rank.grad(0), cycle * 3 * mean + group_rank + 1);
      rank.reducer->begin_step(1);
      rank.contribute(0, 0, 2 * (group_rank + 1));
      rank.reducer->end_step();
      EXPECT_EQ(rank.grad(0), (cycle + 1) * 3 * mean);
      EXPECT_FALSE(rank.has_grad(1));
    }
    EXPECT_EQ(rank.reducer->stats().num_reductions, 3);
  });
}

TEST_P(ReducerRanks, plain_backward_is_reduced_too) {
  comm::run_ranks(size(), [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Rank rank(kFourBuckets, dp, options());
    for (int step = 1; step <= 3; ++step) {
      const at::Tensor loss =
          rank.params[0].add(rank.params[3], 2).sum().mul(group_rank);
      torch::autograd::backward({loss}, {});
      EXPECT_EQ(rank.grad(3), step * (size() - 1.0));
      EXPECT_FALSE(rank.has_grad(1));
    }
  });
}

TEST_P(ReducerRanks, a_step_without_any_backward_reduces_nothing) {
  comm::run_ranks(size(), [&](int, const comm::CommunicatorPtr& dp) {
    Rank rank(kFourBuckets, dp, options());
    rank.contribute(0, -1, 3);
    rank.reducer->begin_step(4);
    rank.reducer->end_step();
    EXPECT_EQ(rank.grad(0), 3);
    EXPECT_EQ(rank.reducer->stats().num_reductions, 1);
  });
}

TEST(ReducerRanksOverlap, overlap_does_not_change_a_bit) {
  std::vector<at::Tensor> grads;
  for (int k = 0; k < 3 * 2 * 2 * 4; ++k) grads.push_back(at::randn({100}));
  std::vector<std::vector<at::Tensor>> results(2);
  for (const bool overlap : {false, true}) {
    comm::run_ranks(2, [&](int group_rank, const comm::CommunicatorPtr& dp) {
      Reducer::Options options = small_buckets();
      options.overlap = overlap;
      Rank rank(kFourBuckets, dp, options);
      for (int step = 0; step < 3; ++step) {
        rank.reducer->begin_step(2);
        for (int mb = 0; mb < 2; ++mb) {
          for (int i = 3; i >= 0; --i) {
            rank.contribute(i, mb,
                            grads[((step * 2 + mb) * 2 + group_rank) * 4 + i]);
          }
          rank.reducer->finish_microbatch(mb);
        }
        rank.reducer->end_step();
      }
      if (group_rank == 0) {
        for (const at::Tensor& param : rank.params) {
          results[overlap].push_back(param.grad().clone());
        }
        EXPECT_EQ(rank.reducer->stats().num_early_buckets, overlap ? 8 : 0);
      }
    });
  }
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(results[0][i].equal(results[1][i]));
}

// Returns the error of every rank; fails unless all of them raise.
std::vector<std::string> errors_of(
    int size, const std::function<void(int, comm::CommunicatorPtr)>& body) {
  std::vector<std::string> errors(size);
  comm::run_ranks(size, [&](int group_rank, const comm::CommunicatorPtr& dp) {
    try {
      body(group_rank, dp);
    } catch (const Error& error) {
      errors[group_rank] = error.what();
    }
  });
  for (const std::string& error : errors) EXPECT_NE(error, "");
  return errors;
}

TEST(ReducerDisagreement, other_parameters_are_named_on_every_rank) {
  const auto errors = errors_of(3, [](int group_rank, auto dp) {
    Rank rank({{3}, {group_rank == 2 ? 5 : 4}, {6}}, dp, small_buckets());
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("p1: Float[4]"), std::string::npos) << error;
    EXPECT_NE(error.find("group rank 2 has p1: Float[5]"), std::string::npos);
  }
}

TEST(ReducerDisagreement, a_missing_parameter_is_named_on_every_rank) {
  const auto errors = errors_of(2, [](int group_rank, auto dp) {
    const std::vector<std::vector<int64_t>> shapes(group_rank == 0 ? 2 : 1,
                                                   {3});
    Rank rank(shapes, dp, small_buckets());
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("group rank 1 has nothing"), std::string::npos)
        << error;
  }
}

TEST(ReducerDisagreement, other_options_are_named_on_every_rank) {
  const auto errors = errors_of(2, [](int group_rank, auto dp) {
    Reducer::Options options = small_buckets();
    options.passes_per_reduction = 1 + group_rank;
    Rank rank({{3}}, dp, options);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("backward_passes_per_step 2"), std::string::npos)
        << error;
  }
}

TEST_P(ReducerRanks, each_rank_takes_the_mean_over_its_own_microbatches) {
  comm::run_ranks(size(), [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Rank rank(kFourBuckets, dp, options());
    // Rank r has r + 1 microbatches in the first step, then the others do.
    for (int step = 0; step < 4; ++step) {
      rank.zero_grad();
      const int owner = step % 2 == 0 ? group_rank : size() - 1 - group_rank;
      rank.reducer->begin_step(owner + 1);
      for (int mb = 0; mb <= owner; ++mb) {
        for (int i = 3; i >= 0; --i) rank.contribute(i, mb, mb + i);
        rank.reducer->finish_microbatch(mb);
      }
      rank.reducer->end_step();
      for (int i = 0; i < 4; ++i) {
        EXPECT_NEAR(rank.grad(i), (size() - 1) * 0.25 + i, 1e-6);
      }
    }
  });
}

TEST_P(ReducerRanks, two_of_one_group_may_fill_their_buckets_in_any_order) {
  comm::run_ranks(size(), [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Rank first(kFourBuckets, dp, options());
    Rank second(kFourBuckets, dp, options());
    for (int step = 0; step < 3; ++step) {
      for (Rank* rank : {&first, &second}) rank->zero_grad();
      first.reducer->begin_step(1);
      second.reducer->begin_step(1, /*may_overlap=*/false);
      Rank* order[] = {&first, &second};
      if (group_rank % 2 == 1) std::swap(order[0], order[1]);
      for (Rank* rank : order) {
        for (int i = 3; i >= 0; --i) {
          rank->contribute(i, 0, rank == &first ? i + 1 : 10 * (i + 1));
        }
      }
      first.reducer->end_step();
      second.reducer->end_step();
      for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(first.grad(i), i + 1);
        EXPECT_EQ(second.grad(i), 10 * (i + 1));
      }
    }
    EXPECT_EQ(second.reducer->stats().num_early_buckets, 0);
    EXPECT_EQ(first.reducer->stats().num_early_buckets,
              options().overlap ? 8 : 0);
  });
}

TEST(ReducerWaits, a_rank_that_does_not_come_is_told_after_the_timeout) {
  const auto world = comm::make_local_world(2);
  comm::run_ranks(2, [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Reducer::Options options = small_buckets();
    options.wait.timeout = std::chrono::milliseconds(300);
    Rank rank({{3}}, dp, options);
    if (group_rank == 1) return;
    rank.reducer->begin_step(1);
    rank.contribute(0, 0, 1);
    try {
      rank.reducer->end_step();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(dp->name()), std::string::npos);
    }
    EXPECT_THROW(rank.reducer->begin_step(1), Error);  // cannot go on
  });
}

TEST(ReducerWaits, a_fault_ends_the_wait_and_names_the_culprit) {
  const auto board = std::make_shared<health::FaultBoard>(0);
  comm::run_ranks(2, [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Reducer::Options options = small_buckets();
    options.wait.faults = board;
    Rank rank({{3}}, dp, options);
    if (group_rank == 1) {
      EXPECT_TRUE(
          becomes_true([&] { return board->waits().snapshot().is_blocked; }));
      health::Fault fault;
      fault.kind = health::Fault::Kind::kDied;
      fault.global_rank = 1;
      board->report(fault);
      return;
    }
    rank.reducer->begin_step(1);
    rank.contribute(0, 0, 1);
    EXPECT_THROW(rank.reducer->end_step(), PeerFailure);
    EXPECT_FALSE(board->waits().snapshot().is_blocked);
  });
}

TEST(ReducerWaits, a_peer_that_left_is_named) {
  const auto board = std::make_shared<health::FaultBoard>(4);
  comm::run_ranks(2, [&](int group_rank, const comm::CommunicatorPtr& dp) {
    Reducer::Options options = small_buckets();
    options.wait.faults = board;
    options.wait.peers = {4, 7};
    options.wait.grace = std::chrono::milliseconds(50);
    Rank rank({{3}}, dp, options);
    if (group_rank == 1) return board->mark_left(7);
    rank.reducer->begin_step(1);
    rank.contribute(0, 0, 1);
    try {
      rank.reducer->end_step();
      ADD_FAILURE() << "no error";
    } catch (const PeerFailure& error) {
      EXPECT_NE(std::string(error.what()).find("global_rank 7 has left"),
                std::string::npos);
    }
  });
}

TEST(ReducerWaits, sums_of_a_device_need_a_control_group_of_the_host) {
  comm::run_ranks(2, [](int, const comm::CommunicatorPtr& host) {
    const auto dp = std::make_shared<comm::StreamGroup>(host);
    const at::Tensor param = at::full({3}, 0.0).requires_grad_();
    const auto record = whole_record(0, "p", {3}, param.scalar_type(), 2);
    EXPECT_THROW(Reducer({param}, std::vector<at::Tensor>{}, {record}, dp,
                         small_buckets()),
                 ValueError);
  });
}

// Not only in the second run of these tests, in which all groups are like it.
TEST(ReducerWaits, the_host_waits_for_no_sum_of_a_device) {
  comm::run_ranks(2, [](int group_rank, const comm::CommunicatorPtr& host) {
    const auto log = std::make_shared<comm::IssueLog>();
    const at::Tensor param = at::full({3}, 0.0).requires_grad_();
    Reducer::Options options = small_buckets();
    options.control = host;
    Reducer reducer({param}, std::vector<at::Tensor>{},
                    {whole_record(0, "p", {3}, param.scalar_type(), 2)},
                    std::make_shared<comm::StreamGroup>(host, log),
                    std::move(options));
    for (int step = 0; step < 3; ++step) {
      param.mutable_grad().reset();
      reducer.begin_step(1);
      torch::autograd::backward(
          {param.mul(1)}, {at::full_like(param.detach(), 1.0 + group_rank)});
      reducer.end_step();
      EXPECT_EQ(param.grad().sum().item<double>(), 4.5);
    }
    EXPECT_EQ(log->issued.size(), 3U);
  });
}

}  // namespace
}  // namespace smp::gradients
