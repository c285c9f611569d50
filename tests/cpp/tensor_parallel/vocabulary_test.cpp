#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <set>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/tensor_parallel/seeds.h"
#include "csrc/tensor_parallel/vocabulary.h"
#include "tests/cpp/tensor_parallel/ranks.h"

namespace smp::tensor_parallel {
namespace {

constexpr int64_t kVocabulary = 23;

Sizes split(int size) {
  Sizes sizes(size, kVocabulary / size);
  for (int64_t i = 0; i < kVocabulary % size; ++i) sizes[i] += 1;
  return sizes;
}

int64_t begin_of(int size, int rank) {
  int64_t begin = 0;
  for (int i = 0; i < rank; ++i) begin += split(size)[i];
  return begin;
}

at::Tensor part_of(const at::Tensor& x, int64_t dim, int size, int rank) {
  return x.narrow(dim, begin_of(size, rank), split(size)[rank]);
}

class Vocabulary : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Vocabulary, testing::Values(1, 2, 3, 4));

TEST_P(Vocabulary, EmbeddingsOfAllRanksAddUpToTheWholeOne) {
  const int size = GetParam();
  const at::Tensor table = at::randn({kVocabulary, 5}, at::kDouble);
  const at::Tensor ids = at::randint(kVocabulary, {6, 7}, at::kLong);
  const at::Tensor g = at::randn({6, 7, 5}, at::kDouble);
  at::Tensor leaf = table.clone().requires_grad_();
  const at::Tensor expected = at::embedding(leaf, ids, /*padding_idx=*/4);
  const at::Tensor expected_grad =
      torch::autograd::grad({expected}, {leaf}, {g})[0];
  at::Tensor sum = g.new_zeros(g.sizes());
  for (int rank = 0; rank < size; ++rank) {
    at::Tensor part = part_of(table, 0, size, rank).clone().requires_grad_();
    const at::Tensor rows =
        vocabulary_embedding(ids, part, begin_of(size, rank), 4);
    sum.add_(rows.detach());
    expect_close(torch::autograd::grad({rows}, {part}, {g})[0],
                 part_of(expected_grad, 0, size, rank), "gradient");
  }
  expect_close(sum, expected.detach(), "sum");
}

TEST(VocabularyEmbedding, RowsOfOthersAreZeroWhateverTheTableHolds) {
  const at::Tensor table = at::full({2, 3}, NAN).requires_grad_();
  const at::Tensor rows =
      vocabulary_embedding(at::full({4}, 7, at::kLong), table, 1, -1);
  EXPECT_TRUE(rows.eq(0).all().item<bool>()) << rows;
  const at::Tensor grad = torch::autograd::grad({rows.sum()}, {table})[0];
  EXPECT_TRUE(grad.eq(0).all().item<bool>()) << grad;
}

struct Problem {
  at::Tensor logits;  // [tokens, vocabulary]
  at::Tensor targets;
  at::Tensor g;
  at::Tensor losses;
  at::Tensor grad;
};

Problem make_problem(double smoothing, at::ScalarType dtype = at::kDouble,
                     int64_t tokens = 9) {
  Problem problem;
  problem.logits =
      at::randn({tokens, kVocabulary}, at::kDouble).mul(30).to(dtype);
  problem.targets = at::randint(kVocabulary, {tokens}, at::kLong);
  problem.targets[1] = -100;
  problem.g = at::randn({tokens}, at::kDouble);
  at::Tensor leaf = problem.logits.to(at::kDouble).requires_grad_();
  const at::Tensor losses = at::cross_entropy_loss(
      leaf, problem.targets, {}, /*reduction: none*/ 0, -100, smoothing);
  problem.losses = losses.detach();
  problem.grad = torch::autograd::grad({losses}, {leaf}, {problem.g})[0];
  return problem;
}

Outcome run_cross_entropy(const Problem& problem, int size, double smoothing) {
  std::vector<Tensors> inputs;
  for (int rank = 0; rank < size; ++rank) {
    inputs.push_back({part_of(problem.logits, 1, size, rank)});
  }
  const at::ScalarType dtype = problem.logits.scalar_type();
  const Tensors g(
      size, problem.g.to(dtype == at::kDouble ? at::kDouble : at::kFloat));
  return run_region(inputs, g, [&](const GroupPtr& group, const Tensors& in) {
    return vocabulary_cross_entropy(
        group, in[0], problem.targets,
        {begin_of(size, group->group_rank()), kVocabulary, -100, smoothing});
  });
}

TEST_P(Vocabulary, CrossEntropyIsThatOfTheWholeLogits) {
  const int size = GetParam();
  for (const double smoothing : {0.0, 0.1}) {
    const Problem problem = make_problem(smoothing);
    const Outcome got = run_cross_entropy(problem, size, smoothing);
    for (int rank = 0; rank < size; ++rank) {
      expect_close(got.outputs[rank], problem.losses, "losses");
      expect_close(got.grads[rank][0], part_of(problem.grad, 1, size, rank),
                   "gradient");
    }
  }
}

TEST_P(Vocabulary, CrossEntropyOf16BitIsComputedIn32) {
  const int size = GetParam();
  const Problem problem = make_problem(0.1, at::kBFloat16);
  const Outcome got = run_cross_entropy(problem, size, 0.1);
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(got.outputs[rank].scalar_type(), at::kFloat);
    EXPECT_EQ(got.grads[rank][0].scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::allclose(got.outputs[rank].to(at::kDouble), problem.losses,
                             1e-5, 1e-4));
    EXPECT_TRUE(at::allclose(got.grads[rank][0].to(at::kDouble),
                             part_of(problem.grad, 1, size, rank), 1e-2, 1e-4));
  }
}

TEST(CrossEntropy, RowsInManyChunksAreAsInOne) {
  // 23 columns: more than 2849 rows need two chunks.
  const Problem problem = make_problem(0.0, at::kDouble, 6000);
  const Outcome got = run_cross_entropy(problem, 2, 0.0);
  expect_close(got.outputs[1], problem.losses, "losses");
  expect_close(got.grads[1][0], part_of(problem.grad, 1, 2, 1), "gradient");
}

TEST(CrossEntropy, ExchangesThreeNumbersPerTokenAndNothingInBackward) {
  comm::run_ranks(2, [](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const at::Tensor logits = at::randn({10, 8}).requires_grad_();
    const at::Tensor losses = vocabulary_cross_entropy(
        group, logits, at::zeros({10}, at::kLong), {8 * rank, 16});
    EXPECT_EQ(group->traffic().num_calls, 2);
    EXPECT_EQ(group->traffic().bytes_sent, 3 * 10 * 4);
    torch::autograd::grad({losses.sum()}, {logits});
    EXPECT_EQ(group->traffic().num_calls, 2);
  });
}

TEST(CrossEntropy, RefusesTargetsOutsideOfTheVocabulary) {
  const auto group =
      std::make_shared<Group>(nullptr, nullptr, 0, 1, comm::WaitOptions());
  const std::string text = text_of_error([&] {
    vocabulary_cross_entropy(group, at::zeros({2, 4}),
                             at::full({2}, 4, at::kLong), {0, 4});
  });
  EXPECT_NE(text.find("target 4 is out of bounds"), std::string::npos) << text;
}

TEST(Seeds, OwnDifferAndCommonAgree) {
  std::mutex mutex;
  std::set<int64_t> own;
  std::set<int64_t> common;
  comm::run_ranks(3, [&](int, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const int64_t one = own_seed(*group);
    const int64_t all = common_seed(*group);
    std::lock_guard lock(mutex);
    EXPECT_GE(one, 0);
    EXPECT_GE(all, 0);
    own.insert(one);
    common.insert(all);
  });
  EXPECT_EQ(own.size(), 3u);
  EXPECT_EQ(common.size(), 1u);
}

TEST(Seeds, ThatOfTheFirstRankIsGivenToAll) {
  comm::run_ranks(3, [&](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    EXPECT_EQ(seed_of_first(*group, 70 + rank), 70);
  });
}

TEST(Agreement, OneRankThatDoesNotSaySoIsEnough) {
  comm::run_ranks(3, [&](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    EXPECT_TRUE(group->all_say(true, "agreement"));
    EXPECT_FALSE(group->all_say(rank != 1, "agreement"));
    EXPECT_FALSE(group->all_say(false, "agreement"));
    const bool before = set_alone(true);
    EXPECT_EQ(group->all_say(rank == 1, "agreement"), rank == 1);
    set_alone(before);
  });
}

}  // namespace
}  // namespace smp::tensor_parallel
