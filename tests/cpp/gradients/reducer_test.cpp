#include "csrc/gradients/reducer.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "csrc/common/check.h"
#include "tests/cpp/gradients/reducer_fixture.h"

namespace smp::gradients {
namespace {

const std::vector<std::vector<int64_t>> kShapesOfReplicas = {
    {3, 5}, {70}, {}, {4, 2, 2}};

// One rank alone ------------------------------------------------------------

TEST(ReducerAlone, one_contribution_is_bitwise_what_autograd_computed) {
  Rank rank(kShapesOfReplicas, nullptr, small_buckets());
  rank.reducer->begin_step(1);
  std::vector<at::Tensor> grads;
  for (size_t i = 0; i < kShapesOfReplicas.size(); ++i) {
    grads.push_back(at::randn_like(rank.params[i].detach()));
    grads.back().flatten()[0].fill_(-0.0);
    rank.contribute(static_cast<int>(i), 0, grads.back());
    EXPECT_FALSE(rank.has_grad(static_cast<int>(i)));
  }
  rank.reducer->end_step();
  for (size_t i = 0; i < kShapesOfReplicas.size(); ++i) {
    EXPECT_TRUE(rank.params[i].grad().equal(grads[i]));
    EXPECT_TRUE(rank.params[i].grad().signbit().equal(grads[i].signbit()));
  }
}

// The result of contributions (param, mb, tensor) that arrive in this order.
using Arrival = std::vector<std::tuple<int, int, at::Tensor>>;

std::vector<at::Tensor> result_of(const Arrival& arrival, int num_microbatches,
                                  bool finish_early) {
  Rank rank({{40}, {9}}, nullptr, small_buckets());
  std::vector<int> left(num_microbatches, 0);
  for (const auto& [param, mb, grad] : arrival) ++left[mb];
  rank.reducer->begin_step(num_microbatches);
  for (const auto& [param, mb, grad] : arrival) {
    rank.contribute(param, mb, grad);
    if (--left[mb] == 0 && finish_early) rank.reducer->finish_microbatch(mb);
  }
  rank.reducer->end_step();
  return {rank.params[0].grad().clone(), rank.params[1].grad().clone()};
}

TEST(ReducerAlone, arrival_order_of_microbatches_does_not_change_a_bit) {
  constexpr int kNumMicrobatches = 5;
  Arrival in_order;
  for (int mb = 0; mb < kNumMicrobatches; ++mb) {
    for (int i : {1, 0, 0}) {
      in_order.emplace_back(i, mb,
                            at::randn({i == 0 ? 40 : 9}).mul(1 + 99 * mb));
    }
  }
  const auto expected = result_of(in_order, kNumMicrobatches, true);
  EXPECT_GT(expected[0].abs().max().item<double>(), 0);
  std::mt19937 random(7);
  bool some_reordered = false;
  for (int trial = 0; trial < 30; ++trial) {
    // Interleave microbatches at random; each keeps its own order.
    std::vector<int> turns;
    for (const auto& item : in_order) turns.push_back(std::get<1>(item));
    std::shuffle(turns.begin(), turns.end(), random);
    std::vector<int> next(kNumMicrobatches, 0);
    Arrival shuffled;
    for (int mb : turns) shuffled.push_back(in_order[3 * mb + next[mb]++]);
    some_reordered =
        some_reordered || !std::is_sorted(turns.begin(), turns.end());
    const auto got = result_of(shuffled, kNumMicrobatches, trial % 2 == 0);
    EXPECT_TRUE(got[0].equal(expected[0])) << "trial " << trial;
    EXPECT_TRUE(got[1].equal(expected[1])) << "trial " << trial;
  }
  EXPECT_TRUE(some_reordered);
}

TEST(ReducerAlone, averages_or_sums_over_microbatches_as_asked) {
  for (const bool average : {true, false}) {
    Reducer::Options options = small_buckets();
    options.average_over_microbatches = average;
    Rank rank({{3}}, nullptr, options);
    rank.reducer->begin_step(4);
    for (int mb = 0; mb < 4; ++mb) rank.contribute(0, mb, mb + 1.0);
    rank.reducer->end_step();
    EXPECT_EQ(rank.grad(0), average ? 2.5 : 10);
  }
}

TEST(ReducerAlone, divides_by_batches_unless_gradients_are_shares) {
  for (const bool average : {true, false}) {
    Reducer::Options options = small_buckets();
    options.average_over_microbatches = average;
    options.num_batches = 2;
    Rank rank({{3}}, nullptr, options);
    for (const bool are_shares : {false, true}) {
      rank.reducer->begin_step(4, /*may_overlap=*/true, are_shares);
      for (int mb = 0; mb < 4; ++mb) rank.contribute(0, mb, mb + 1.0);
      rank.reducer->end_step();
      const double shares = average ? 1 : 0.25;
      const double divisor = are_shares ? shares : average ? 8 : 2;
      EXPECT_EQ(rank.grad(0), 10 / divisor);
      rank.zero_grad();
    }
  }
}

TEST(ReducerAlone, an_unused_parameter_keeps_no_gradient) {
  Rank rank({{3}, {4}}, nullptr, small_buckets());
  rank.reducer->begin_step(1);
  rank.contribute(1, 0, 2);
  rank.reducer->end_step();
  EXPECT_FALSE(rank.has_grad(0));
  EXPECT_EQ(rank.grad(1), 2);
}

TEST(ReducerAlone, a_step_without_backward_leaves_gradients_alone) {
  Rank rank({{3}}, nullptr, small_buckets());
  for (const double expected : {2.0, 5.0}) {
    rank.reducer->begin_step(1);
    rank.contribute(0, 0, expected == 2 ? 2 : 3);
    rank.reducer->end_step();
    EXPECT_EQ(rank.grad(0), expected);
    rank.reducer->begin_step(3);
    rank.reducer->end_step();
    EXPECT_EQ(rank.grad(0), expected);
  }
  EXPECT_EQ(rank.reducer->stats().num_reductions, 2);
}

TEST(ReducerAlone, gradients_add_up_over_steps_until_they_are_reset) {
  Rank rank({{3}, {4}}, nullptr, small_buckets());
  auto step = [&](int i, double value) {
    rank.reducer->begin_step(2);
    rank.contribute(i, 0, value);
    rank.contribute(i, 1, value);
    rank.reducer->end_step();
  };
  step(0, 1);
  step(0, 2);
  EXPECT_EQ(rank.grad(0), 3);
  step(1, 5);  // the other one, in the same bucket
  EXPECT_EQ(rank.grad(0), 3);
  EXPECT_EQ(rank.grad(1), 5);
  rank.zero_grad();
  step(0, 4);
  EXPECT_EQ(rank.grad(0), 4);
  EXPECT_FALSE(rank.has_grad(1));
  rank.params[0].mutable_grad() = at::full({3}, 10.0);  // the user's own
  step(0, 1);
  EXPECT_EQ(rank.grad(0), 11);
}

// Returns whether a gradient of a later microbatch is freed while an earlier
// one is not finished.
bool passes_early(Rank& rank, int num_microbatches, int first_count) {
  rank.reducer->begin_step(num_microbatches);
  for (int i = 0; i < first_count; ++i) rank.contribute(0, 0, 1);
  bool freed = false;
  auto* const data = new float[3]{4, 4, 4};
  const auto free = [&freed](void* p) {
    freed = true;
    delete[] static_cast<float*>(p);
  };
  {
    const at::Tensor grad = at::from_blob(data, {3}, free);
    const TaskScope task({0, 1});
    torch::autograd::backward({rank.params[0].view({3})}, {grad});
  }
  const bool is_early = freed;
  rank.reducer->end_step();
  EXPECT_TRUE(freed);
  return is_early;
}

TEST(ReducerAlone,
     gradients_of_later_microbatches_wait_only_in_the_first_step) {
  Rank rank({{3}}, nullptr, small_buckets());
  EXPECT_FALSE(passes_early(rank, 2, 1)) << "another one may still come";
  rank.zero_grad();
  EXPECT_TRUE(passes_early(rank, 2, 1));
  EXPECT_EQ(rank.grad(0), 2.5);
  EXPECT_FALSE(passes_early(rank, 3, 1)) << "a step that is not known";
}

TEST(ReducerAlone, who_gives_more_gradients_than_before_is_waited_for) {
  Rank rank({{3}}, nullptr, small_buckets());
  passes_early(rank, 2, 1);
  rank.zero_grad();
  EXPECT_TRUE(passes_early(rank, 2, 2));
  EXPECT_EQ(rank.grad(0), 3) << "all of them count";
  for (int step = 0; step < 2; ++step) {
    EXPECT_FALSE(passes_early(rank, 2, 1)) << "from then on";
  }
}

// 1 - 2^24 + 2^24 and 1 + 2^24 - 2^24 differ in fp32, so the order shows.
TEST(ReducerAlone, the_place_of_a_surplus_gradient_does_not_depend_on_timing) {
  constexpr double kBig = 1 << 24;
  for (const bool comes_last : {false, true}) {
    Rank rank({{3}}, nullptr, small_buckets());
    for (int step = 0; step < 2; ++step) {
      rank.zero_grad();
      rank.reducer->begin_step(2);
      rank.contribute(0, 0, 1);
      if (step == 1 && !comes_last) rank.contribute(0, 0, -kBig);
      rank.contribute(0, 1, kBig);
      if (step == 1 && comes_last) rank.contribute(0, 0, -kBig);
      rank.reducer->end_step();
    }
    EXPECT_EQ(rank.grad(0), 0) << "1 is lost in 2^24 that came before -2^24";
  }
}

TEST(ReducerAlone, a_surplus_gradient_is_added_at_the_end) {
  Rank rank({{3}}, nullptr, small_buckets());
  for (int step = 0; step < 2; ++step) {
    rank.zero_grad();
    rank.reducer->begin_step(2);
    rank.contribute(0, 0, 1);
    rank.contribute(0, 1, 2);
    if (step == 1) rank.contribute(0, 0, 5);
    rank.reducer->finish_microbatch(0);
    rank.reducer->end_step();
    EXPECT_EQ(rank.grad(0), step == 0 ? 1.5 : 4);
  }
}

TEST(ReducerAlone, hears_of_the_end_of_microbatches_in_its_own_steps_only) {
  Rank rank({{5}}, nullptr, small_buckets());
  MicrobatchListener& listener = *rank.reducer;
  listener.on_microbatch_end(0);  // of a step without gradients
  rank.reducer->begin_step(2);
  rank.contribute(0, 0, at::full_like(rank.params[0].detach(), 1));
  listener.on_microbatch_end(0);
  rank.contribute(0, 1, at::full_like(rank.params[0].detach(), 2));
  rank.reducer->end_step();
  EXPECT_TRUE(
      rank.params[0].grad().equal(at::full_like(rank.params[0].detach(), 1.5)));
}

TEST(ReducerAlone, gradients_have_the_strides_of_their_parameter) {
  at::Tensor param = at::zeros({4, 3}).t().requires_grad_();
  Reducer reducer({param}, {},
                  {whole_record(0, "p", {3, 4}, c10::ScalarType::Float)},
                  nullptr, small_buckets());
  const at::Tensor grad = at::randn({3, 4});
  torch::autograd::backward({param.mul(1)}, {grad});
  EXPECT_EQ(param.grad().strides(), param.strides());
  EXPECT_TRUE(param.grad().equal(grad));
}

TEST(ReducerAlone, a_backward_outside_of_steps_is_a_step_of_its_own) {
  Rank rank({{3}, {2}}, nullptr, small_buckets());
  for (const double expected : {4.0, 8.0}) {
    const at::Tensor loss =
        rank.params[0].sum().mul(4).add(rank.params[1].sum());
    torch::autograd::backward({loss}, {});
    EXPECT_FALSE(rank.reducer->in_step());
    EXPECT_EQ(rank.grad(0), expected);
    EXPECT_EQ(rank.grad(1), expected / 4);
  }
}

TEST(ReducerAlone, a_failed_backward_outside_of_steps_is_forgotten) {
  Rank rank({{3}, {3}}, nullptr, small_buckets());
  const at::Tensor middle = rank.params[0].mul(2);
  middle.register_hook([](const at::Tensor& grad) -> at::Tensor {
    throw std::runtime_error("broken");
    return grad;
  });
  // The second parameter gets its gradient before the hook raises.
  const at::Tensor loss = middle.add(rank.params[1]).sum();
  EXPECT_ANY_THROW(torch::autograd::backward({loss}, {}));
  rank.contribute(0, -1, 3);
  EXPECT_EQ(rank.grad(0), 3);
  EXPECT_FALSE(rank.has_grad(1));
  rank.reducer->begin_step(1);
  rank.reducer->end_step();
}

TEST(ReducerAlone, gradients_go_to_autograd_again_when_it_is_gone) {
  Rank rank({{3}}, nullptr, small_buckets());
  rank.contribute(0, -1, 1);
  const at::Tensor before = rank.params[0].grad();
  rank.reducer.reset();
  rank.contribute(0, -1, 1);
  EXPECT_EQ(rank.grad(0), 2);
  EXPECT_TRUE(rank.params[0].grad().is_same(before));
}

TEST(ReducerAlone, passes_add_up_and_are_reduced_once) {
  Reducer::Options options = small_buckets();
  options.passes_per_reduction = 3;
  Rank rank({{3}, {2}}, nullptr, options);
  for (int cycle = 0; cycle < 2; ++cycle) {
    rank.zero_grad();
    const double sums[] = {1, 3, 6};
    for (int pass = 0; pass < 3; ++pass) {
      rank.reducer->begin_step(2);
      rank.contribute(0, 0, pass + 1);
      rank.contribute(0, 1, pass + 1);
      if (pass == 1) rank.contribute(1, 1, 8);
      rank.reducer->end_step();
      EXPECT_EQ(rank.grad(0), sums[pass]);
      EXPECT_EQ(rank.has_grad(1), pass >= 1);
    }
    EXPECT_EQ(rank.grad(1), 4);
    EXPECT_EQ(rank.reducer->stats().num_reductions, cycle + 1);
  }
}

TEST(ReducerAlone, resetting_between_passes_forgets_them) {
  Reducer::Options options = small_buckets();
  options.passes_per_reduction = 2;
  Rank rank({{3}}, nullptr, options);
  rank.contribute(0, -1, 1);
  rank.zero_grad();
  rank.contribute(0, -1, 5);
  EXPECT_EQ(rank.grad(0), 5);
  EXPECT_EQ(rank.reducer->stats().num_reductions, 1);
}

TEST(ReducerAlone, a_cancelled_step_gives_the_old_gradients_back) {
  Rank rank({{3}}, nullptr, small_buckets());
  rank.contribute(0, -1, 2);
  rank.reducer->begin_step(1);
  rank.contribute(0, 0, 9);
  rank.reducer->cancel_step();
  EXPECT_EQ(rank.grad(0), 2);
  rank.contribute(0, -1, 1);
  EXPECT_EQ(rank.grad(0), 3);
}

TEST(ReducerAlone, misuse_is_told) {
  Rank rank({{3}}, nullptr, small_buckets());
  Reducer& reducer = *rank.reducer;
  EXPECT_THROW(reducer.end_step(), Error);
  EXPECT_THROW(reducer.finish_microbatch(0), Error);
  EXPECT_THROW(reducer.begin_step(0), ValueError);
  reducer.begin_step(2);
  EXPECT_THROW(reducer.begin_step(2), Error);
  EXPECT_THROW(reducer.finish_microbatch(2), Error);
  EXPECT_ANY_THROW(rank.contribute(0, 2, 1));
  reducer.finish_microbatch(0);
  EXPECT_ANY_THROW(rank.contribute(0, 0, 1));
  reducer.cancel_step();
  const auto record = whole_record(0, "p", {3}, c10::ScalarType::Float);
  EXPECT_THROW(Reducer({at::zeros({3})}, {}, {record}, nullptr, {}),
               ValueError);
  EXPECT_THROW(
      Reducer({at::zeros({4}).requires_grad_()}, {}, {record}, nullptr, {}),
      ValueError);
  auto rdp = record;
  rdp.group = ReductionGroup::kRdp;
  EXPECT_THROW(Reducer({at::zeros({3}).requires_grad_(),
                        at::zeros({3}).requires_grad_()},
                       {}, {record, rdp}, nullptr, {}),
               ValueError)
      << "two groups";
}

TEST(ReducerAlone, a_sparse_gradient_is_refused_by_name) {
  Rank rank({{3, 2}}, nullptr, small_buckets());
  try {
    rank.contribute(0, -1, at::full({3, 2}, 1.0).to_sparse());
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("p0"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace smp::gradients
