// Reducers that keep shards, against those that keep everything.
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <thread>

#include "csrc/common/check.h"
#include "tests/cpp/gradients/sharded_fixture.h"

namespace smp::gradients {
namespace {

// In buckets of 512 B: larger than one, odd, without dims, without elements.
const std::vector<std::vector<int64_t>> kShapesOfShards = {
    {3, 5}, {70}, {}, {0}, {4, 2, 2}, {33, 7}, {1}};
constexpr int kNumParams = 7;
constexpr int kUnused = 4;

// Gradients that all ranks know: by step, microbatch, rank, parameter.
class Gradients {
 public:
  at::Tensor of(int step, int mb, int rank, int i) {
    const std::lock_guard lock(mutex_);
    at::Tensor& grad = made_[{step, mb, rank, i}];
    if (!grad.defined())
      grad = at::randn(kShapesOfShards[i], at::kDouble).mul(1 + mb);
    return grad;
  }

 private:
  std::mutex mutex_;
  std::map<std::array<int, 4>, at::Tensor> made_;
};

struct Case {
  ShardGrid grid;
  ShardLayout layout = ShardLayout::kEqualCut;
  bool overlap = true;
  bool every_microbatch = false;
  int passes = 1;
  int num_microbatches = 2;

  // The same additions in the same order as without shards.
  bool is_bitwise() const {
    return grid.size() == 2 && passes == 1 &&
           (!every_microbatch || num_microbatches == 1);
  }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const ShardGrid grids[] = {{2, 1, 1}, {3, 1, 1}, {2, 2, 1},
                             {2, 1, 2}, {2, 2, 2}, {4, 1, 1}};
  const std::pair<int, int> passes_and_microbatches[] = {
      {1, 1}, {1, 3}, {2, 2}};
  for (const ShardGrid& grid : grids) {
    for (const auto layout :
         {ShardLayout::kEqualCut, ShardLayout::kPerParameter}) {
      for (const bool every_microbatch : {false, true}) {
        for (const auto& [passes, num_microbatches] : passes_and_microbatches) {
          cases.push_back(
              {grid, layout, true, every_microbatch, passes, num_microbatches});
        }
        if (grid.size() == 2)
          cases.push_back({grid, layout, false, every_microbatch, 1, 3});
      }
    }
  }
  return cases;
}

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return detail::concat(
      "q", c.grid.q, "r", c.grid.replicas, "t", c.grid.tp,
      c.layout == ShardLayout::kEqualCut ? "_equal_cut" : "_per_parameter",
      c.overlap ? "_overlap" : "", c.every_microbatch ? "_every" : "",
      "_passes", c.passes, "_mb", c.num_microbatches);
}

class ShardedReducer : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(all, ShardedReducer, testing::ValuesIn(all_cases()),
                         name_of);

TEST_P(ShardedReducer, has_the_parts_of_what_all_reduced_gradients_are) {
  const Case& c = GetParam();
  Gradients gradients;
  on_grid(c.grid, [&](int rank, const ShardGroups& groups) {
    Reducer::Options options = small_buckets();
    options.overlap = c.overlap;
    options.passes_per_reduction = c.passes;
    Rank plain(kShapesOfShards, groups.plain, options, c10::ScalarType::Double);
    options.sharding = groups.sharding(c.layout, c.every_microbatch);
    ShardedRank sharded(kShapesOfShards, groups, options);
    ASSERT_GT(sharded.reducer->plan().buckets.size(), 2u);
    for (int step = 0; step < 4; ++step) {
      // Twice with gradients of before, which are added.
      if (step % c.passes == 0 && step < 2) {
        plain.zero_grad();
        sharded.zero_grad();
      }
      for (Reducer* reducer : {plain.reducer.get(), sharded.reducer.get()}) {
        reducer->begin_step(c.num_microbatches);
      }
      for (int mb = 0; mb < c.num_microbatches; ++mb) {
        for (int i = kNumParams - 1; i >= 0; --i) {
          if (i == kUnused) continue;
          const at::Tensor grad = gradients.of(step, mb, rank, i);
          plain.contribute(i, mb, grad);
          sharded.contribute(i, mb, grad);
        }
        plain.reducer->finish_microbatch(mb);
        sharded.reducer->finish_microbatch(mb);
      }
      plain.reducer->end_step();
      sharded.reducer->end_step();
      if (step % c.passes != c.passes - 1) continue;
      for (int i = 0; i < kNumParams; ++i) {
        if (!sharded.holds(i)) continue;
        ASSERT_EQ(sharded.grad(i).defined(), i != kUnused);
        if (i == kUnused) continue;
        const at::Tensor expected = sharded.part(i, plain.params[i].grad());
        EXPECT_GT(expected.abs().max().item<double>(), 0);
        EXPECT_TRUE(c.is_bitwise()
                        ? sharded.grad(i).equal(expected)
                        : sharded.grad(i).allclose(expected, 1e-12, 1e-12))
            << "parameter " << i << ", step " << step;
      }
    }
    const auto stats = sharded.reducer->stats();
    EXPECT_EQ(stats.num_reductions, 4 / c.passes);
    EXPECT_EQ(stats.num_rounds,
              4 * (c.every_microbatch ? c.num_microbatches : 1));
    EXPECT_EQ(stats.num_early_buckets > 0, c.overlap);
    EXPECT_EQ(stats.num_late_parameters, 0);
    EXPECT_EQ(stats.flat_bytes, 0);
    EXPECT_GT(stats.peak_flat_bytes, 0);
  });
}

Reducer::Options sharded_options(const ShardGroups& groups, bool overlap = true,
                                 bool every_microbatch = false) {
  Reducer::Options options = small_buckets();
  options.overlap = overlap;
  options.sharding = groups.sharding(ShardLayout::kEqualCut, every_microbatch);
  options.control = groups.control;
  return options;
}

const std::vector<std::vector<int64_t>> kFourShardedBuckets(4, {60});

TEST(ShardedReducerMemory, between_steps_there_are_shards_only) {
  on_grid({2, 1, 1}, [](int, const ShardGroups& groups) {
    ShardedRank rank({{1000}, {600}, {1400}}, groups,
                     sharded_options(groups, /*overlap=*/false));
    rank.reducer->begin_step(1);
    for (int i = 2; i >= 0; --i) rank.contribute(i, 0, 1);
    EXPECT_GE(rank.reducer->stats().flat_bytes, 3000 * 8);
    rank.reducer->end_step();
    EXPECT_EQ(rank.reducer->stats().flat_bytes, 0);
    int64_t bytes = 0;
    for (int b = 0; b < 3; ++b) {
      bytes += rank.reducer->flat(b).storage().nbytes();
    }
    EXPECT_LE(bytes, 1500 * 8 + 3 * 256);
    for (const at::Tensor& target : rank.targets) {
      EXPECT_TRUE(target.grad().storage().nbytes() < 1000 * 8);
    }
  });
}

// Every rank waits until the sum of a bucket is there before the next one.
TEST(ShardedReducerMemory, full_buckets_are_used_again_while_backward_goes_on) {
  on_grid({2, 1, 1}, [](int, const ShardGroups& groups) {
    ShardedRank rank(kFourShardedBuckets, groups, sharded_options(groups));
    const auto num_early = [&] {
      return rank.reducer->stats().num_early_buckets;
    };
    for (int step = 0; step < 2; ++step) {
      rank.zero_grad();
      rank.reducer->begin_step(1);
      for (int i = 3; i >= 0; --i) {
        rank.contribute(i, 0, 1);
        EXPECT_EQ(num_early(), 4 * step + 4 - i);
        groups.plain->barrier()->wait(std::chrono::seconds(20));
        EXPECT_EQ(rank.reducer->stats().flat_bytes, 64 * 8);
      }
      rank.reducer->end_step();
    }
    EXPECT_EQ(rank.reducer->stats().peak_flat_bytes, 64 * 8);
  });
}

// One bucket fills, one is on its way to a rank that is slower.
TEST(ShardedReducerMemory, two_full_buckets_are_there_at_most) {
  on_grid({2, 1, 1}, [](int rank_idx, const ShardGroups& groups) {
    const std::vector<std::vector<int64_t>> shapes = {{50}, {60}, {40}, {64},
                                                      {33}, {60}, {62}};
    ShardedRank rank(shapes, groups, sharded_options(groups));
    ASSERT_EQ(rank.reducer->plan().buckets.size(), shapes.size());
    for (int step = 0; step < 3; ++step) {
      rank.zero_grad();
      rank.reducer->begin_step(1);
      for (int i = 6; i >= 0; --i) {
        if (rank_idx == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(15));
        }
        rank.contribute(i, 0, 1);
      }
      rank.reducer->end_step();
    }
    EXPECT_LE(rank.reducer->stats().peak_flat_bytes, 2 * 64 * 8);
    EXPECT_EQ(rank.reducer->stats().num_late_parameters, 0);
  });
}

// One rank uses the parameters of the first bucket, the other one does not, so
// there it leaves at the end only; and that end waits for something of the
// first rank, as gathers of parameters would.
TEST(ShardedReducerMemory, ranks_that_need_each_other_go_on) {
  on_grid({2, 1, 1}, [](int rank_idx, const ShardGroups& groups) {
    ShardedRank rank(kFourShardedBuckets, groups, sharded_options(groups));
    for (int step = 0; step < 4; ++step) {
      rank.zero_grad();
      rank.reducer->begin_step(1);
      for (int i = 3; i >= 0; --i) {
        if (i < 3 || rank_idx == 0) rank.contribute(i, 0, 1);
      }
      groups.plain->barrier()->wait(std::chrono::seconds(20));
      rank.reducer->end_step();
      EXPECT_TRUE(rank.grad(3).equal(at::full_like(rank.grad(3), 0.5)));
      EXPECT_TRUE(rank.grad(0).equal(at::full_like(rank.grad(0), 1)));
    }
    EXPECT_EQ(rank.reducer->stats().peak_flat_bytes, 4 * 64 * 8);
  });
}

// Gradients that the user has set to None have no memory while forward and
// backward run.
TEST(ShardedReducerMemory, shards_that_nobody_reads_any_more_are_let_go_of) {
  on_grid({2, 1, 1}, [](int, const ShardGroups& groups) {
    ShardedRank rank(kFourShardedBuckets, groups, sharded_options(groups));
    EXPECT_FALSE(rank.reducer->flat(0).defined());
    for (int step = 0; step < 3; ++step) {
      if (step < 2) rank.zero_grad();
      rank.reducer->begin_step(1);
      EXPECT_FALSE(rank.reducer->flat(0).defined());
      EXPECT_EQ(rank.grad(0).defined(), step == 2);
      for (int i = 3; i >= 0; --i) rank.contribute(i, 0, 1);
      rank.reducer->end_step();
      EXPECT_TRUE(rank.grad(0).is_alias_of(rank.reducer->flat(3)));
      EXPECT_TRUE(
          rank.grad(0).equal(at::full_like(rank.grad(0), step < 2 ? 1 : 2)));
    }
  });
}

TEST(ShardedReducerUse, a_parameter_used_on_one_rank_counts_on_all) {
  on_grid({2, 2, 1}, [](int group_rank, const ShardGroups& groups) {
    ShardedRank rank(kFourShardedBuckets, groups, sharded_options(groups));
    for (int step = 0; step < 3; ++step) {
      rank.zero_grad();
      rank.reducer->begin_step(1);
      if (group_rank == step) rank.contribute(2, 0, 6);
      rank.reducer->end_step();
      EXPECT_TRUE(rank.grad(2).equal(at::full_like(rank.grad(2), 1.5)));
      EXPECT_FALSE(rank.grad(0).defined());
    }
  });
}

// A parameter gets several gradients, as in a pipeline, where each remote call
// of a module gives one. The gradients of the second microbatch come before the
// first one is over.
TEST(ShardedReducerUse, the_first_step_adds_several_gradients_in_their_order) {
  Gradients gradients;
  on_grid({2, 1, 1}, [&](int rank, const ShardGroups& groups) {
    Rank plain(kFourShardedBuckets, groups.plain, small_buckets(),
               c10::ScalarType::Double);
    Reducer::Options options = sharded_options(groups);
    options.expects_one_per_microbatch = false;
    ShardedRank sharded(kFourShardedBuckets, groups, options);
    for (Reducer* reducer : {plain.reducer.get(), sharded.reducer.get()}) {
      reducer->begin_step(2);
    }
    for (int call = 0; call < 6; ++call) {
      for (int i = 3; i >= 0; --i) {
        const at::Tensor grad = gradients.of(call, 0, rank, 0).flatten();
        const at::Tensor whole =
            grad.repeat({60}).narrow(0, 0, 60).mul(1.0 / (3 + i + call));
        plain.contribute(i, call % 2, whole);
        sharded.contribute(i, call % 2, whole);
      }
    }
    for (int mb = 0; mb < 2; ++mb) {
      plain.reducer->finish_microbatch(mb);
      sharded.reducer->finish_microbatch(mb);
      // All of the second one is there already.
      EXPECT_EQ(sharded.reducer->stats().num_early_buckets, 4);
    }
    plain.reducer->end_step();
    sharded.reducer->end_step();
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(
          sharded.grad(i).equal(sharded.part(i, plain.params[i].grad())));
    }
    EXPECT_EQ(sharded.reducer->stats().num_late_parameters, 0);
  });
}

// The sum over copies of a bucket begins when its sum over shards is there, and
// not before the last microbatch and the last pass. Of a device it does not.
TEST(ShardedReducerUse, further_sums_begin_while_gradients_come) {
  for (const bool every_microbatch : {false, true}) {
    for (const int passes : {1, 2}) {
      on_grid({2, 2, 1}, [&](int group_rank, const ShardGroups& groups) {
        Reducer::Options options =
            sharded_options(groups, true, every_microbatch);
        options.passes_per_reduction = passes;
        ShardedRank rank(kFourShardedBuckets, groups, options);
        int64_t expected = 0;
        for (int step = 0; step < 4; ++step) {
          if (step % passes == 0) rank.zero_grad();
          const bool is_last_pass = step % passes == passes - 1;
          rank.reducer->begin_step(2);
          for (int mb = 0; mb < 2; ++mb) {
            for (int i = 3; i >= 0; --i) {
              rank.contribute(i, mb, group_rank + i);
              // So the sum of the bucket is there when the next one comes.
              groups.plain->barrier()->wait(std::chrono::seconds(20));
            }
            const bool is_early = is_last_pass && mb == 1;
            if (is_early && !groups.dp->is_stream_ordered()) expected += 3;
            EXPECT_EQ(rank.reducer->stats().num_early_hops, expected);
            rank.reducer->finish_microbatch(mb);
          }
          rank.reducer->end_step();
          if (!is_last_pass) continue;
          for (int i = 0; i < 4; ++i) {
            EXPECT_TRUE(rank.grad(i).equal(
                at::full_like(rank.grad(i), passes * (1.5 + i))));
          }
        }
      });
    }
  }
}

TEST(ShardedReducerUse, late_gradients_are_summed_in_a_second_round) {
  for (const bool every_microbatch : {false, true}) {
    on_grid({2, 2, 1}, [&](int group_rank, const ShardGroups& groups) {
      ShardedRank rank(kFourShardedBuckets, groups,
                       sharded_options(groups, true, every_microbatch));
      for (int step = 0; step < 3; ++step) {
        rank.zero_grad();
        rank.reducer->begin_step(2);
        for (int mb = 0; mb < 2; ++mb) {
          for (int i = 3; i >= 0; --i) rank.contribute(i, mb, group_rank + i);
          if (step == 1 && group_rank == 0) rank.contribute(3, mb, 8);
          rank.reducer->finish_microbatch(mb);
        }
        rank.reducer->end_step();
        const double late = step == 1 ? 2 : 0;
        EXPECT_TRUE(
            rank.grad(3).equal(at::full_like(rank.grad(3), 1.5 + 3 + late)));
        EXPECT_TRUE(rank.grad(1).equal(at::full_like(rank.grad(1), 1.5 + 1)));
      }
      EXPECT_EQ(rank.reducer->stats().num_late_parameters,
                group_rank == 0 ? 1 : 0);
    });
  }
}

// 1 + 2^-9 is 1 in bfloat16; in float32 nothing is lost.
TEST(ShardedReducerPrecision, narrow_gradients_are_added_up_in_float32) {
  on_grid({2, 1, 1}, [](int, const ShardGroups& groups) {
    const std::vector<std::vector<int64_t>> shapes(4, {200});
    ShardedRank rank(shapes, groups, sharded_options(groups),
                     c10::ScalarType::BFloat16, c10::ScalarType::Float);
    rank.reducer->begin_step(2);
    for (int i = 3; i >= 0; --i) rank.contribute(i, 0, 2);
    for (int i = 3; i >= 0; --i) rank.contribute(i, 1, 1.0 / 256);
    rank.reducer->end_step();
    int num_held = 0;
    for (int i = 0; i < 4; ++i) {
      EXPECT_FALSE(rank.params[i].grad().defined());
      if (!rank.holds(i)) continue;
      ++num_held;
      EXPECT_EQ(rank.grad(i).scalar_type(), c10::ScalarType::Float);
      EXPECT_TRUE(
          rank.grad(i).equal(at::full_like(rank.grad(i), 1 + 1.0 / 512)));
    }
    EXPECT_GT(num_held, 0);
  });
}

TEST(ReducerTargets, masters_of_whole_parameters_get_the_gradients) {
  comm::run_ranks(2, [](int group_rank, const comm::CommunicatorPtr& dp) {
    const at::Tensor param = at::zeros({6, 5}, at::kBFloat16).requires_grad_();
    const at::Tensor unheld = at::zeros({3}, at::kBFloat16).requires_grad_();
    const at::Tensor master = at::zeros({6, 5}).requires_grad_();
    std::vector<ParameterRecord> records = {
        whole_record(0, "p", {6, 5}, at::kBFloat16, 2),
        whole_record(1, "q", {3}, at::kBFloat16, 2)};
    for (auto& record : records) record.accumulation_dtype = at::kFloat;
    Reducer reducer({param, unheld}, {master, at::Tensor()}, records, dp,
                    small_buckets());
    for (int step = 1; step < 3; ++step) {
      reducer.begin_step(2);
      for (int mb = 0; mb < 2; ++mb) {
        const TaskScope task({0, mb});
        const double value = mb == 0 ? 2 : 1.0 / 256;
        torch::autograd::backward({param.mul(1), unheld.mul(1)},
                                  {at::full_like(param.detach(), value),
                                   at::full_like(unheld.detach(), value)});
      }
      reducer.end_step();
      EXPECT_FALSE(param.grad().defined());
      EXPECT_FALSE(unheld.grad().defined());
      EXPECT_TRUE(master.grad().equal(
          at::full_like(master.detach(), step * (1 + 1.0 / 512))))
          << group_rank;
    }
  });
}

TEST(ReducerTargets, other_targets_than_the_rank_holds_are_refused) {
  on_grid({2, 1, 1}, [](int, const ShardGroups& groups) {
    const at::Tensor param = at::zeros({100}).requires_grad_();
    const auto record = whole_record(0, "p", {100}, at::kFloat, 2);
    auto make = [&](const at::Tensor& target) {
      Reducer(std::vector<at::Tensor>{param}, {target}, {record}, groups.dp,
              sharded_options(groups));
    };
    EXPECT_THROW(make(at::zeros({100}).requires_grad_()), ValueError);
    EXPECT_THROW(make(at::zeros({64}, at::kDouble).requires_grad_()),
                 ValueError);
    make(groups.shard->group_rank() == 0 ? at::zeros({64}).requires_grad_()
                                         : at::zeros({36}).requires_grad_());
  });
}

TEST(ShardedReducerSteps, setting_gradients_to_none_forgets_earlier_passes) {
  on_grid({2, 2, 1}, [](int group_rank, const ShardGroups& groups) {
    Reducer::Options options = sharded_options(groups);
    options.passes_per_reduction = 2;
    ShardedRank rank({{100}}, groups, options);
    for (const bool forgets : {false, true}) {
      rank.zero_grad();
      for (int pass = 0; pass < 2; ++pass) {
        if (pass == 1 && forgets) rank.zero_grad();
        rank.reducer->begin_step(1);
        rank.contribute(0, 0, group_rank + 10 * pass);
        rank.reducer->end_step();
      }
      EXPECT_TRUE(
          rank.grad(0).equal(at::full_like(rank.grad(0), forgets ? 11.5 : 13)));
    }
  });
}

TEST(ShardedReducerSteps, a_cancelled_step_leaves_what_was_there) {
  on_grid({2, 1, 1}, [](int, const ShardGroups& groups) {
    for (const bool every_microbatch : {false, true}) {
      ShardedRank rank(
          kFourShardedBuckets, groups,
          sharded_options(groups, /*overlap=*/false, every_microbatch));
      for (int step = 0; step < 3; ++step) {
        rank.reducer->begin_step(2);
        for (int i = 0; i < 4; ++i) rank.contribute(i, 0, step + 1);
        rank.reducer->finish_microbatch(0);
        if (step == 1) {
          rank.reducer->cancel_step();
        } else {
          for (int i = 0; i < 4; ++i) rank.contribute(i, 1, step + 1);
          rank.reducer->finish_microbatch(1);
          rank.reducer->end_step();
        }
        EXPECT_EQ(rank.reducer->stats().flat_bytes, 0);
        const double expected = step < 2 ? 1 : 4;
        EXPECT_TRUE(rank.grad(1).equal(at::full_like(rank.grad(1), expected)));
      }
    }
  });
}

TEST(ShardedReducerSteps, plain_backward_is_reduced_too) {
  on_grid({2, 1, 1}, [](int group_rank, const ShardGroups& groups) {
    for (const bool every_microbatch : {false, true}) {
      ShardedRank rank(kFourShardedBuckets, groups,
                       sharded_options(groups, true, every_microbatch));
      for (int step = 1; step <= 3; ++step) {
        const at::Tensor loss =
            rank.params[0].add(rank.params[3], 2).sum().mul(group_rank);
        torch::autograd::backward({loss}, {});
        EXPECT_TRUE(rank.grad(3).equal(at::full_like(rank.grad(3), step)));
        EXPECT_FALSE(rank.grad(1).defined());
      }
    }
  });
}

// Returns the error of every rank; fails unless all of them raise.
std::vector<std::string> errors_of(
    const ShardGrid& grid,
    const std::function<void(int, const ShardGroups&)>& body) {
  std::vector<std::string> errors(grid.size());
  on_grid(grid, [&](int rank, const ShardGroups& groups) {
    try {
      body(rank, groups);
    } catch (const Error& error) {
      errors[rank] = error.what();
    }
  });
  for (const std::string& error : errors) EXPECT_NE(error, "");
  return errors;
}

TEST(ShardedReducerDisagreement, other_numbers_of_microbatches_are_told) {
  const auto errors =
      errors_of({2, 1, 1}, [](int rank, const ShardGroups& groups) {
        ShardedRank one({{100}}, groups, sharded_options(groups, true, true));
        one.reducer->begin_step(2 + rank);
        one.contribute(0, 0, 1);
        one.reducer->finish_microbatch(0);
      });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("between 2 and 3 of them"), std::string::npos)
        << error;
  }
}

TEST(ShardedReducerDisagreement, other_layouts_are_told) {
  const auto errors =
      errors_of({2, 1, 1}, [](int rank, const ShardGroups& groups) {
        Reducer::Options options = sharded_options(groups, true, rank == 1);
        ShardedRank one({{100}}, groups, options);
      });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("reduced every microbatch"), std::string::npos)
        << error;
  }
}

}  // namespace
}  // namespace smp::gradients
