#include "csrc/tensor_parallel/token_exchange.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "tests/cpp/tensor_parallel/ranks.h"

namespace smp::tensor_parallel {
namespace {

constexpr int64_t kHidden = 6;
constexpr int64_t kNumExperts = 7;

at::Tensor random_numbers(at::IntArrayRef shape) {
  return at::randn(shape, at::TensorOptions(at::kDouble));
}

// Tokens of one rank and the experts they have chosen; k choices differ.
struct Batch {
  at::Tensor x;        // [tokens, hidden]
  at::Tensor experts;  // [tokens, k]
  at::Tensor weights;  // [tokens, k]
  at::Tensor dy;       // [tokens, hidden]
};

enum class Load { kRandom, kOneExpert, kOneRankHasAll };

Batch make_batch(int rank, Load load) {
  int64_t num_tokens = 3 + 2 * rank;
  if (load == Load::kOneRankHasAll && rank > 0) num_tokens = 0;
  const int64_t k = load == Load::kOneExpert ? 1 : 3;
  at::Tensor experts = random_numbers({num_tokens, kNumExperts})
                           .argsort(int64_t{1})
                           .narrow(1, 0, k);
  if (load == Load::kOneExpert)
    experts = at::full({num_tokens, k}, 4, experts.options());
  return {random_numbers({num_tokens, kHidden}), experts.contiguous(),
          random_numbers({num_tokens, k}),
          random_numbers({num_tokens, kHidden})};
}

// sum_k weights_k * tanh(x * scale_expert), for experts of [begin, end).
at::Tensor run_experts(const at::Tensor& x, const at::Tensor& experts,
                       const at::Tensor& weights, const at::Tensor& scales,
                       int64_t begin, int64_t end) {
  const at::Tensor here = experts.ge(begin).logical_and(experts.lt(end));
  const at::Tensor local = at::where(here, experts.sub(begin), 0);
  const at::Tensor scale = scales.index_select(0, local.reshape({-1}))
                               .reshape({x.size(0), experts.size(1), kHidden});
  const at::Tensor used = at::where(here, weights, 0.0);
  return x.unsqueeze(1).mul(scale).tanh().mul(used.unsqueeze(-1)).sum(1);
}

Sizes uneven_sizes(int num_ranks) {
  Sizes sizes(num_ranks, kNumExperts / num_ranks);
  for (int64_t i = 0; i < kNumExperts % num_ranks; ++i) sizes[i] += 1;
  return sizes;
}

Tensors leaves_of(const Batch& batch, const at::Tensor& scales) {
  Tensors leaves{batch.x, batch.weights, scales};
  for (at::Tensor& leaf : leaves) leaf = leaf.detach().clone();
  for (at::Tensor& leaf : leaves) leaf.set_requires_grad(true);
  return leaves;
}

class Tokens : public testing::TestWithParam<std::tuple<int, Load>> {};
INSTANTIATE_TEST_SUITE_P(
    Loads, Tokens,
    testing::Combine(testing::Values(1, 2, 3, 4),
                     testing::Values(Load::kRandom, Load::kOneExpert,
                                     Load::kOneRankHasAll)));

TEST_P(Tokens, OutputsAndGradientsAreThoseOfOneProcess) {
  const auto [num_ranks, load] = GetParam();
  at::manual_seed(11);
  const at::Tensor scales = random_numbers({kNumExperts, kHidden});
  std::vector<Batch> batches;
  for (int i = 0; i < num_ranks; ++i) batches.push_back(make_batch(i, load));
  const Sizes sizes = uneven_sizes(num_ranks);
  std::vector<Tensors> grads(num_ranks);
  Tensors outputs(num_ranks);
  comm::run_ranks(num_ranks, [&](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const Batch& batch = batches[rank];
    const int64_t begin =
        std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
    Tensors leaves = leaves_of(batch, scales.narrow(0, begin, sizes[rank]));
    const RoutesPtr routes = route(group, batch.experts, sizes);
    const Tensors sent =
        dispatch(group, {leaves[0], leaves[1], batch.experts}, routes);
    const at::Tensor& rows = sent[0];
    const at::Tensor& weights = sent[1];
    const at::Tensor& ids = sent[2];
    EXPECT_FALSE(ids.requires_grad());
    const at::Tensor local =
        ids.ge(begin).logical_and(ids.lt(begin + sizes[rank]));
    EXPECT_EQ(local.sum().item<int64_t>(), routes->num_pairs);
    // Each row is here for an expert of this rank.
    EXPECT_TRUE(local.any(1).all().item<bool>());
    int64_t num_tokens = 0;
    for (const Batch& one : batches) num_tokens += one.x.size(0);
    EXPECT_EQ(routes->group_tokens, num_tokens);
    EXPECT_LE(rows.size(0), num_tokens);
    const at::Tensor y = combine(
        group,
        run_experts(rows, ids, weights, leaves[2], begin, begin + sizes[rank]),
        routes);
    outputs[rank] = y.detach();
    grads[rank] = torch::autograd::grad({y}, leaves, {batch.dy});
  });
  at::Tensor scale_grad = at::zeros_like(scales);
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Batch& batch = batches[rank];
    const Tensors leaves = leaves_of(batch, scales);
    const at::Tensor y = run_experts(leaves[0], batch.experts, leaves[1],
                                     leaves[2], 0, kNumExperts);
    const Tensors expected = torch::autograd::grad({y}, leaves, {batch.dy});
    expect_close(outputs[rank], y.detach(), "output");
    expect_close(grads[rank][0], expected[0], "gradient of tokens");
    expect_close(grads[rank][1], expected[1], "gradient of weights");
    scale_grad.add_(expected[2]);
  }
  Tensors parts;
  for (const Tensors& of_rank : grads) parts.push_back(of_rank[2]);
  EXPECT_GT(scale_grad.abs().sum().item<double>(), 0.1);
  expect_close(at::cat(parts), scale_grad, "gradient of experts");
}

TEST(TokenExchange, ATokenGoesToARankOnceAndToNoOtherThanNeeded) {
  comm::run_ranks(2, [](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const at::Tensor experts =
        rank == 0
            ? at::tensor({0, 1, 1, 2, 3, 2, 0, 3}, at::TensorOptions(at::kLong))
                  .reshape({4, 2})
            : at::tensor({3, 2}, at::TensorOptions(at::kLong)).reshape({1, 2});
    const RoutesPtr routes = route(group, experts, {2, 2});
    EXPECT_EQ(routes->sent, rank == 0 ? Sizes({3, 3}) : Sizes({0, 1}));
    EXPECT_EQ(routes->received, rank == 0 ? Sizes({3, 0}) : Sizes({3, 1}));
    EXPECT_EQ(routes->num_pairs, rank == 0 ? 4 : 6);
    EXPECT_EQ(routes->group_tokens, 5);
    const at::Tensor x =
        at::arange(experts.size(0), at::kDouble).add(10 * rank).unsqueeze(1);
    const at::Tensor rows = dispatch(group, {x}, routes)[0].squeeze(1);
    const std::vector<double> expected = rank == 0
                                             ? std::vector<double>{0, 1, 3}
                                             : std::vector<double>{1, 2, 3, 10};
    EXPECT_TRUE(rows.equal(at::tensor(expected, at::kDouble))) << rows;
    const at::Tensor back = combine(group, rows.unsqueeze(1), routes);
    const std::vector<double> sums =
        rank == 0 ? std::vector<double>{0, 2, 2, 6} : std::vector<double>{10};
    EXPECT_TRUE(back.squeeze(1).equal(at::tensor(sums, at::kDouble))) << back;
  });
}

TEST(TokenExchange, WithoutDataOrOthersEveryTokenStays) {
  comm::run_ranks(2, [](int rank, const comm::CommunicatorPtr& comm) {
    if (rank == 1) return;  // nobody else is needed
    const GroupPtr group = make_group(comm);
    for (const bool meta : {true, false}) {
      const bool before = set_alone(!meta);
      const auto on = at::TensorOptions(meta ? at::kMeta : at::kCPU);
      const at::Tensor experts = at::zeros({5, 2}, on.dtype(at::kLong));
      const RoutesPtr routes = route(group, experts, {2, 2});
      EXPECT_EQ(routes->num_pairs, 10);
      EXPECT_EQ(routes->received, Sizes({5, 0}));
      const at::Tensor x =
          at::zeros({5, 3}, on.dtype(at::kFloat)).requires_grad_();
      set_alone(before);  // backward, too, is as the forward was
      const at::Tensor y =
          combine(group, dispatch(group, {x}, routes)[0], routes);
      EXPECT_EQ(y.sizes().vec(), (std::vector<int64_t>{5, 3}));
      const Tensors grad = torch::autograd::grad({y}, {x}, {at::zeros_like(y)});
      EXPECT_EQ(grad[0].sizes().vec(), (std::vector<int64_t>{5, 3}));
    }
  });
}

TEST(TokenExchange, RanksThatDisagreeAreToldOfBoth) {
  comm::run_ranks(2, [](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const at::Tensor two = at::zeros({3, 2}, at::TensorOptions(at::kLong));
    std::string text = text_of_error(
        [&] { route(group, two, rank == 0 ? Sizes{2, 2} : Sizes{1, 3}); });
    EXPECT_NE(text.find("disagree"), std::string::npos) << text;
    text = text_of_error([&] {
      route(group, at::zeros({3, 2 + rank}, at::TensorOptions(at::kLong)),
            {2, 2});
    });
    EXPECT_NE(text.find("route of Long[3]"), std::string::npos) << text;
    const RoutesPtr routes = route(group, two, {2, 2});
    text = text_of_error(
        [&] { dispatch(group, {at::zeros({3, 4 + rank})}, routes); });
    EXPECT_NE(text.find("dispatch of Float[5]"), std::string::npos) << text;
    EXPECT_EQ(dispatch(group, {at::zeros({3, 4})}, routes)[0].size(0),
              rank == 0 ? 6 : 0);
  });
}

TEST(TokenExchange, ArgumentsThatDoNotFitAreRefused) {
  comm::run_ranks(2, [](int, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const auto longs = at::TensorOptions(at::kLong);
    const auto text = [&](const at::Tensor& experts, const Sizes& sizes) {
      return text_of_error([&] { route(group, experts, sizes); });
    };
    EXPECT_NE(text(at::zeros({3}, longs), {2, 2}).find("[tokens, k]"),
              std::string::npos);
    EXPECT_NE(text(at::zeros({3, 2}, longs), {4}).find("experts of 2 ranks"),
              std::string::npos);
    EXPECT_NE(text(at::full({3, 2}, 4, longs), {2, 2})
                  .find("in [0, 4), got 6 others"),
              std::string::npos);
    EXPECT_NE(text(at::full({3, 2}, -1, longs), {2, 2}).find("6 others"),
              std::string::npos);
    const RoutesPtr routes = route(group, at::zeros({3, 2}, longs), {2, 2});
    EXPECT_THROW(dispatch(group, {at::zeros({4, 2})}, routes), ValueError);
    EXPECT_THROW(combine(group, at::zeros({4, 2}), routes), ValueError);
  });
}

TEST(RowExchange, SidesThatDisagreeAreToldWhereTheBackendComparesNothing) {
  comm::run_ranks(3, [](int rank, const comm::CommunicatorPtr& comm) {
    comm::WaitOptions wait;
    wait.timeout = std::chrono::seconds(20);
    const auto on =
        std::make_shared<comm::StreamGroup>(comm::CommunicatorPtr(comm));
    Group group(on, comm, rank, 3, wait);
    const Sizes one{1, 1, 1};
    const Sizes sent = rank == 1 ? Sizes{1, 1, 2} : one;
    const int64_t rows = rank == 1 ? 4 : 3;
    const std::string text = text_of_error([&] {
      group.begin_row_exchange(at::zeros({rows, 5}), sent, one, "rows").take();
    });
    EXPECT_NE(text.find("group rank 1 sends 10 elements to group rank 2, which "
                        "expects 5"),
              std::string::npos)
        << text;
  });
}

}  // namespace
}  // namespace smp::tensor_parallel
