#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "csrc/comm/forwarding_communicator.h"
#include "csrc/common/check.h"
#include "csrc/tensor_parallel/layer_name.h"
#include "tests/cpp/tensor_parallel/ranks.h"

namespace smp::tensor_parallel {
namespace {

// A way to split a dim of a tensor [4, 6, 12] over some ranks.
struct Case {
  int size;
  int64_t dim;
  bool uneven;
  bool strided;  // not contiguous

  Sizes sizes() const {
    Sizes sizes(size, 12 / size);
    if (uneven) {
      sizes.front() += 2;
      sizes.back() -= 2;
    }
    return sizes;
  }
  Sizes given() const { return uneven ? sizes() : Sizes(); }
  std::vector<int64_t> shape(int64_t extent) const {
    std::vector<int64_t> shape{4, 6, 5};
    shape[dim < 0 ? dim + 3 : dim] = extent;
    return shape;
  }
  at::Tensor make(int64_t extent) const {
    const auto shape = this->shape(extent);
    if (!strided) return randn(shape);
    return randn({shape[2], shape[0], shape[1]}).permute({1, 2, 0});
  }
  at::Tensor part(const at::Tensor& x, int rank) const {
    const Sizes all = sizes();
    return x.narrow(dim, std::accumulate(all.begin(), all.begin() + rank, 0L),
                    all[rank]);
  }
  Tensors parts() const {
    Tensors result;
    for (const int64_t n : sizes()) result.push_back(make(n));
    return result;
  }
  Tensors wholes() const {
    Tensors result;
    for (int i = 0; i < size; ++i) result.push_back(make(12));
    return result;
  }
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::to_string(c.size) + "ranks_dim" +
         (c.dim < 0 ? "last" : std::to_string(c.dim)) +
         (c.uneven ? "_uneven" : "") + (c.strided ? "_strided" : "");
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const int size : {1, 2, 3, 4}) {
    for (const int64_t dim : {0, 1, -1}) {
      for (const bool uneven : {false, true}) {
        if (uneven && size == 1) continue;
        for (const bool strided : {false, true}) {
          cases.push_back({size, dim, uneven, strided});
        }
      }
    }
  }
  return cases;
}

std::vector<Tensors> one_each(const Tensors& inputs) {
  std::vector<Tensors> result;
  for (const at::Tensor& input : inputs) result.push_back({input});
  return result;
}

class Regions : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Splits, Regions, testing::ValuesIn(all_cases()),
                         name_of);

TEST_P(Regions, CopyIsTheIdentityAndSumsGradients) {
  const Case c = GetParam();
  const Tensors x = c.wholes();
  const Tensors g = c.wholes();
  const Outcome got =
      run_region(one_each(x), g, [](const GroupPtr& group, const Tensors& in) {
        return copy(group, in[0]);
      });
  for (int rank = 0; rank < c.size; ++rank) {
    expect_close(got.outputs[rank], x[rank], "output");
    expect_close(got.grads[rank][0], sum_of(g), "gradient");
  }
}

TEST_P(Regions, ReduceSumsAndPassesGradientsOn) {
  const Case c = GetParam();
  const Tensors x = c.wholes();
  const Tensors before = {x[0].clone()};
  const Tensors g = c.wholes();
  const Outcome got =
      run_region(one_each(x), g, [](const GroupPtr& group, const Tensors& in) {
        return reduce(group, in[0]);
      });
  for (int rank = 0; rank < c.size; ++rank) {
    expect_close(got.outputs[rank], sum_of(x), "output");
    expect_close(got.grads[rank][0], g[rank], "gradient");
  }
  expect_close(x[0], before[0], "input");
}

TEST_P(Regions, GatherConcatenatesAndScattersTheSumOfGradients) {
  const Case c = GetParam();
  const Tensors x = c.parts();
  const Tensors g = c.wholes();
  const Outcome got =
      run_region(one_each(x), g, [&](const GroupPtr& group, const Tensors& in) {
        return gather(group, in[0], c.dim, c.given(), GatheredGrad::kSum);
      });
  for (int rank = 0; rank < c.size; ++rank) {
    expect_close(got.outputs[rank], at::cat(x, c.dim), "output");
    expect_close(got.grads[rank][0], c.part(sum_of(g), rank), "gradient");
  }
}

TEST_P(Regions, GatherWithEqualGradientsTakesItsOwnPart) {
  const Case c = GetParam();
  const Tensors x = c.parts();
  const Tensors g = c.wholes();
  const Outcome got =
      run_region(one_each(x), g, [&](const GroupPtr& group, const Tensors& in) {
        return gather(group, in[0], c.dim, c.given(), GatheredGrad::kOwn);
      });
  for (int rank = 0; rank < c.size; ++rank) {
    expect_close(got.outputs[rank], at::cat(x, c.dim), "output");
    expect_close(got.grads[rank][0], c.part(g[rank], rank), "gradient");
  }
}

TEST_P(Regions, ReduceScatterGivesThePartOfTheSumAndGathersGradients) {
  const Case c = GetParam();
  const Tensors x = c.wholes();
  const Tensors g = c.parts();
  const Outcome got =
      run_region(one_each(x), g, [&](const GroupPtr& group, const Tensors& in) {
        return reduce_scatter(group, in[0], c.dim, c.given());
      });
  for (int rank = 0; rank < c.size; ++rank) {
    expect_close(got.outputs[rank], c.part(sum_of(x), rank), "output");
    expect_close(got.grads[rank][0], at::cat(g, c.dim), "gradient");
  }
}

TEST_P(Regions, ScatterTakesTheOwnPartAndGathersGradients) {
  const Case c = GetParam();
  const Tensors x = c.wholes();
  const Tensors g = c.parts();
  const Outcome got =
      run_region(one_each(x), g, [&](const GroupPtr& group, const Tensors& in) {
        return scatter(group, in[0], c.dim, c.given());
      });
  for (int rank = 0; rank < c.size; ++rank) {
    expect_close(got.outputs[rank], c.part(x[rank], rank), "output");
    expect_close(got.grads[rank][0], at::cat(g, c.dim), "gradient");
  }
}

// Whole along `c.dim` and split along another dim before; afterwards the other
// way round.
TEST_P(Regions, ExchangeIsATransposeOfPartsAndBackwardItsInverse) {
  const Case c = GetParam();
  const int64_t split_dim = c.dim;
  const int64_t concat_dim = c.dim == 1 ? 0 : 1;
  Sizes concat(c.size);
  std::iota(concat.begin(), concat.end(), 1);
  if (!c.uneven) std::fill(concat.begin(), concat.end(), 2);
  Tensors x;
  Tensors expected;
  for (int rank = 0; rank < c.size; ++rank) {
    std::vector<int64_t> shape = c.shape(12);
    shape[concat_dim] = concat[rank];
    x.push_back(c.strided
                    ? randn({shape[2], shape[0], shape[1]}).permute({1, 2, 0})
                    : randn(shape));
  }
  Tensors g;
  for (int rank = 0; rank < c.size; ++rank) {
    Tensors parts;
    for (const at::Tensor& one : x) parts.push_back(c.part(one, rank));
    expected.push_back(at::cat(parts, concat_dim));
    g.push_back(randn(expected.back().sizes().vec()));
  }
  const Outcome got =
      run_region(one_each(x), g, [&](const GroupPtr& group, const Tensors& in) {
        return exchange(group, in[0], split_dim, concat_dim, c.given(),
                        c.uneven ? concat : Sizes());
      });
  int64_t begin = 0;
  for (int rank = 0; rank < c.size; ++rank) {
    expect_close(got.outputs[rank], expected[rank], "output");
    Tensors parts;
    for (const at::Tensor& one : g) {
      parts.push_back(one.narrow(concat_dim, begin, concat[rank]));
    }
    expect_close(got.grads[rank][0], at::cat(parts, split_dim), "gradient");
    begin += concat[rank];
  }
}

struct Linears {
  std::vector<Tensors> weights;  // [rank][product]
  std::vector<Tensors> biases;   // undefined: none

  explicit Linears(int size) : weights(size), biases(size) {
    for (int rank = 0; rank < size; ++rank) {
      for (const int64_t features : {3, 4}) {
        weights[rank].push_back(randn({features, 5}));
      }
      biases[rank] = {randn({3}), at::Tensor()};
    }
  }

  static at::Tensor plain(const at::Tensor& x, const Tensors& leaves) {
    return at::cat(
        {at::linear(x, leaves[1], leaves[3]), at::linear(x, leaves[2])}, -1);
  }
  Tensors leaves(int rank, const at::Tensor& x) const {
    return {x, weights[rank][0], weights[rank][1], biases[rank][0]};
  }
};

void check_gathered_linears(const Case& c, std::optional<int64_t> dim) {
  const Linears linears(c.size);
  const Tensors x = dim ? c.parts() : Tensors(c.size, c.make(12));
  const at::Tensor whole = dim ? at::cat(x, c.dim) : x[0];
  std::vector<Tensors> inputs;
  Tensors g;
  for (int rank = 0; rank < c.size; ++rank) {
    inputs.push_back(linears.leaves(rank, x[rank]));
    std::vector<int64_t> shape = whole.sizes().vec();
    shape.back() = 7;
    g.push_back(randn(shape));
  }
  const Outcome got =
      run_region(inputs, g, [&](const GroupPtr& group, const Tensors& in) {
        return at::cat(gathered_linears(group, in[0], {in[1], in[2]},
                                        {in[3], at::Tensor()}, dim,
                                        dim ? c.given() : Sizes()),
                       -1);
      });
  std::vector<Tensors> plain_grads;
  Tensors input_grads;
  for (int rank = 0; rank < c.size; ++rank) {
    Tensors leaves;
    for (const at::Tensor& one : linears.leaves(rank, whole)) {
      leaves.push_back(one.detach().requires_grad_());
    }
    const at::Tensor output = Linears::plain(leaves[0], leaves);
    expect_close(got.outputs[rank], output.detach(), "output");
    plain_grads.push_back(torch::autograd::grad({output}, leaves, {g[rank]}));
    input_grads.push_back(plain_grads.back()[0]);
  }
  const at::Tensor sum = sum_of(input_grads);
  for (int rank = 0; rank < c.size; ++rank) {
    expect_close(got.grads[rank][0], dim ? c.part(sum, rank) : sum, "input");
    for (int i = 1; i < 4; ++i) {
      expect_close(got.grads[rank][i], plain_grads[rank][i],
                   "parameter " + std::to_string(i));
    }
  }
}

// Features are not gathered.
std::vector<Case> cases_of_products(bool even_only) {
  std::vector<Case> cases = all_cases();
  std::erase_if(cases, [&](const Case& one) {
    return one.dim < 0 || (even_only && (one.uneven || one.dim > 0));
  });
  return cases;
}

class Products : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Splits, Products,
                         testing::ValuesIn(cases_of_products(false)), name_of);

TEST_P(Products, AreThoseOfTheGatheredInput) {
  check_gathered_linears(GetParam(), GetParam().dim);
}

class WholeProducts : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Sizes, WholeProducts,
                         testing::ValuesIn(cases_of_products(true)), name_of);

TEST_P(WholeProducts, SumTheInputGradient) {
  check_gathered_linears(GetParam(), std::nullopt);
}

TEST(GatheredLinears, KeepTheOwnPartAlone) {
  comm::run_ranks(2, [](int, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    at::Tensor x = randn({2, 3}).requires_grad_();
    at::Tensor weight = randn({4, 3}).requires_grad_();
    const int64_t before = group->traffic().num_calls;
    const at::Tensor y =
        gathered_linears(group, x, {weight}, {at::Tensor()}, 0, {})[0];
    EXPECT_EQ(group->traffic().num_calls, before + 1);
    EXPECT_EQ(y.size(0), 4);
    torch::autograd::grad({y.sum()}, {weight});
    EXPECT_EQ(group->traffic().num_calls, before + 2);  // gathered once more
  });
}

TEST(GatheredLinears, CommunicateOnlyForWantedGradients) {
  comm::run_ranks(2, [](int, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const at::Tensor x = randn({2, 3}).requires_grad_();
    const at::Tensor weight = randn({4, 3});
    const at::Tensor y =
        gathered_linears(group, x, {weight}, {at::Tensor()}, 0, {})[0];
    const int64_t before = group->traffic().num_calls;
    torch::autograd::grad({y.sum()}, {x});
    EXPECT_EQ(group->traffic().num_calls, before + 1);  // the reduce-scatter
  });
}

TEST(RegionErrors, ShapesThatDifferAreNamedOnEveryRank) {
  comm::run_ranks(2, [](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const std::string text = text_of_error([&] {
      gather(group, randn({2, rank == 0 ? 3 : 5}), 0, {}, GatheredGrad::kSum);
    });
    for (const char* part : {"[2, 3]", "[2, 5]", "group rank 1",
                             "pad batches and sequences", "gather"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
    }
    // The same number of elements is no excuse.
    EXPECT_NE(text_of_error([&] {
                reduce(group, rank == 0 ? randn({2, 3}) : randn({3, 2}));
              }).find("[3, 2]"),
              std::string::npos);
    EXPECT_EQ(reduce(group, at::zeros({2})).sizes()[0], 2);
  });
}

// A communicator of the kind that compares nothing by itself.
class Careless final : public comm::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  bool stamp_next(uint64_t /*stamp*/) override { return false; }
};

TEST(RegionErrors, BackendsThatCompareNothingGetAComparisonBefore) {
  comm::run_ranks(3, [](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(std::make_shared<Careless>(comm), comm);
    EXPECT_EQ(reduce(group, randn({4})).numel(), 4);
    const std::string text =
        text_of_error([&] { reduce(group, randn({2, rank == 2 ? 3 : 5})); });
    EXPECT_NE(text.find("group rank 2: reduce of Double[2, 3]"),
              std::string::npos)
        << text;
    EXPECT_EQ(reduce(group, randn({4})).numel(), 4);
  });
}

TEST(RegionErrors, OtherRegionsAreNamed) {
  comm::run_ranks(2, [](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const std::string text = text_of_error([&] {
      if (rank == 0) {
        reduce(group, randn({4}));
      } else {
        gather(group, randn({4}), 0, {}, GatheredGrad::kSum);
      }
    });
    EXPECT_NE(text.find("reduce of Double[4]"), std::string::npos) << text;
    EXPECT_NE(text.find("gather of Double[4] along dim 0"), std::string::npos);
  });
}

TEST(RegionErrors, OtherLayersOfOneShapeAreNamed) {
  comm::run_ranks(2, [](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const std::string path(80, 'x');  // longer than what a header keeps of it
    exchange_layer_name(path + (rank == 0 ? ".first" : ".last"));
    const std::string text = text_of_error([&] { reduce(group, randn({4})); });
    EXPECT_NE(text.find("x.first'"), std::string::npos) << text;
    EXPECT_NE(text.find("x.last'"), std::string::npos) << text;

    const std::string other = rank == 0 ? "a" : "b";  // in what is cut off
    exchange_layer_name(other + path);
    EXPECT_NE(text_of_error([&] { reduce(group, randn({4})); }), "");
    EXPECT_EQ(exchange_layer_name(""), other + path);
    EXPECT_EQ(reduce(group, randn({4})).numel(), 4);
  });
}

TEST(RegionErrors, APeerThatNeverComesIsATimeOut) {
  comm::run_ranks(2, [](int rank, const comm::CommunicatorPtr& comm) {
    if (rank == 1) return;
    comm::WaitOptions wait;
    wait.timeout = std::chrono::milliseconds(250);
    const auto group = std::make_shared<Group>(comm, nullptr, 0, 2, wait);
    const std::string text = text_of_error([&] { reduce(group, randn({4})); });
    EXPECT_NE(text.find("waited 250 ms for the reduce over local"),
              std::string::npos)
        << text;
  });
}

TEST(RegionErrors, AFaultEndsTheWait) {
  comm::run_ranks(2, [](int rank, const comm::CommunicatorPtr& comm) {
    if (rank == 1) return;
    comm::WaitOptions wait;
    wait.faults = std::make_shared<health::FaultBoard>(0);
    wait.faults->report({.kind = health::Fault::Kind::kDied, .global_rank = 1});
    const auto group = std::make_shared<Group>(comm, nullptr, 0, 2, wait);
    EXPECT_THROW(reduce(group, randn({4})), PeerFailure);
  });
}

TEST(RegionErrors, SizesThatDoNotFitAreRefused) {
  comm::run_ranks(2, [](int, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    EXPECT_THROW(scatter(group, randn({5}), 0, {}), ValueError);
    EXPECT_THROW(scatter(group, randn({5}), 0, {3, 3}), ValueError);
    EXPECT_THROW(scatter(group, randn({5}), 1, {}), ValueError);
    EXPECT_THROW(exchange(group, randn({4, 4}), 1, -1, {}, {}), ValueError);
    EXPECT_THROW(
        gathered_linears(group, randn({4, 4}), {randn({2, 4})}, {{}}, 1, {}),
        ValueError);
  });
}

TEST(Alone, NothingIsCommunicatedAndShapesAreRight) {
  comm::run_ranks(2, [](int rank, const comm::CommunicatorPtr& comm) {
    if (rank == 1) return;
    const GroupPtr group = make_group(comm);
    at::Tensor y;
    const at::Tensor x = randn({2, 4}).requires_grad_();
    {
      const AloneScope alone(true);
      y = gather(group, x, 0, {2, 3}, GatheredGrad::kSum);
      EXPECT_EQ(y.sizes().vec(), (std::vector<int64_t>{5, 4}));
      EXPECT_TRUE(y.narrow(0, 2, 2).equal(x));
      EXPECT_EQ(exchange(group, x, 1, 0, {3, 1}, {}).sizes().vec(),
                (std::vector<int64_t>{4, 3}));
      EXPECT_EQ(reduce_scatter(group, x, 1, {}).sizes().vec(),
                (std::vector<int64_t>{2, 2}));
      EXPECT_TRUE(reduce(group, x).equal(x));
    }
    // The backward of `y` does not look for the others either.
    const Tensors grads = torch::autograd::grad({y.sum()}, {x});
    EXPECT_EQ(grads[0].sizes().vec(), x.sizes().vec());
    const at::Tensor meta = x.detach().to(at::kMeta);
    EXPECT_EQ(gather(group, meta, 1, {}, GatheredGrad::kSum).size(1), 8);
    EXPECT_EQ(group->traffic().num_calls, 0);
  });
}

TEST(SecondDerivative, IsRefusedByName) {
  comm::run_ranks(2, [](int, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const at::Tensor x = randn({2, 4}).requires_grad_();
    const at::Tensor y = reduce_scatter(group, x.mul(x), 0, {});
    const at::Tensor dx =
        torch::autograd::grad({y.mul(y).sum()}, {x}, {}, true, true)[0];
    const std::string text =
        text_of_error([&] { torch::autograd::grad({dx.sum()}, {x}); });
    EXPECT_NE(text.find("reduce_scatter can be differentiated once only"),
              std::string::npos)
        << text;
  });
}

TEST(Traffic, CountsWhatMustBeSent) {
  comm::run_ranks(4, [](int, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    const auto sent = [&](auto region) {
      const int64_t before = group->traffic().bytes_sent;
      region();
      return group->traffic().bytes_sent - before;
    };
    const at::Tensor x = at::zeros({8, 16});  // 512 bytes
    EXPECT_EQ(sent([&] { reduce(group, x); }), 2 * 512 * 3 / 4);
    EXPECT_EQ(sent([&] { gather(group, x, 0, {}, GatheredGrad::kSum); }),
              512 * 3);
    EXPECT_EQ(sent([&] { reduce_scatter(group, x, 0, {}); }), 512 * 3 / 4);
    EXPECT_EQ(sent([&] { exchange(group, x, 0, 1, {}, {}); }), 512 * 3 / 4);
    EXPECT_EQ(sent([&] { copy(group, x); }), 0);
  });
}

}  // namespace
}  // namespace smp::tensor_parallel
