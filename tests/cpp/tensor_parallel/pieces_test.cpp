#include "csrc/tensor_parallel/pieces.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>

#include <string>

#include "csrc/comm/forwarding_communicator.h"
#include "tests/cpp/comm/stream_group.h"
#include "tests/cpp/tensor_parallel/ranks.h"

namespace smp::tensor_parallel {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(NumPieces, AreLargeEqualAndFew) {
  EXPECT_EQ(num_pieces(kMiB, 8), 1);
  EXPECT_EQ(num_pieces(40 * kMiB, 8), 2);
  EXPECT_EQ(num_pieces(48 * kMiB, 9), 3);
  EXPECT_EQ(num_pieces(48 * kMiB, 8), 2);  // three are not equal
  EXPECT_EQ(num_pieces(4096 * kMiB, 8), 4);
  EXPECT_EQ(num_pieces(4096 * kMiB, 7), 1);
}

TEST(NumPieces, IsOneWhereTransfersTakeTheCoresOfProducts) {
  const int64_t expected = comm::streams_wanted() ? 2 : 1;
  comm::run_ranks(2, [expected](int, const comm::CommunicatorPtr& comm) {
    const at::Tensor large = at::empty({2, 4096, 8192}, at::kFloat);
    EXPECT_EQ(make_group(comm)->num_pieces(large, 2), expected);
  });
}

// ---- values ----------------------------------------------------------------

class Pieces : public testing::TestWithParam<std::tuple<int, int64_t>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  int64_t num_pieces() const { return std::get<1>(GetParam()); }

  Tensors of_ranks(std::vector<int64_t> shape) const {
    Tensors result;
    for (int rank = 0; rank < size(); ++rank) result.push_back(randn(shape));
    return result;
  }
};
INSTANTIATE_TEST_SUITE_P(Sizes, Pieces,
                         testing::Combine(testing::Values(2, 3),
                                          testing::Values<int64_t>(1, 2, 4)));

TEST_P(Pieces, ProductsAreThoseOfTheGatheredInput) {
  const Tensors x = of_ranks({num_pieces(), 1, 2, 3, 5});
  const Tensors first = of_ranks({4, 5});
  const Tensors second = of_ranks({3, 5});
  const Tensors bias = of_ranks({4});
  const Tensors g = of_ranks({num_pieces(), size(), 2, 3, 7});
  std::vector<Tensors> inputs;
  for (int rank = 0; rank < size(); ++rank) {
    inputs.push_back({x[rank], first[rank], second[rank], bias[rank]});
  }
  const Outcome got =
      run_region(inputs, g, [&](const GroupPtr& group, const Tensors& in) {
        const int64_t before = group->traffic().num_calls;
        const auto products = gathered_linears(group, in[0], {in[1], in[2]},
                                               {in[3], at::Tensor()}, 1, {});
        EXPECT_EQ(group->traffic().num_calls, before + num_pieces());
        return at::cat(products, -1);
      });
  Tensors input_grads;
  const at::Tensor whole = at::cat(x, 1);
  for (int rank = 0; rank < size(); ++rank) {
    Tensors leaves{whole, first[rank], second[rank], bias[rank]};
    for (at::Tensor& leaf : leaves) leaf = leaf.detach().requires_grad_();
    const at::Tensor y = at::cat({at::linear(leaves[0], leaves[1], leaves[3]),
                                  at::linear(leaves[0], leaves[2])},
                                 -1);
    expect_close(got.outputs[rank], y.detach(), "output");
    const Tensors grads = torch::autograd::grad({y}, leaves, {g[rank]});
    input_grads.push_back(grads[0]);
    for (int i = 1; i < 4; ++i) {
      expect_close(got.grads[rank][i], grads[i], std::to_string(i));
    }
  }
  const at::Tensor sum = sum_of(input_grads);
  for (int rank = 0; rank < size(); ++rank) {
    expect_close(got.grads[rank][0], sum.narrow(1, rank, 1), "input");
  }
}

TEST_P(Pieces, SumsAreThoseOfAllRanksTerms) {
  const Tensors x = of_ranks({num_pieces(), size(), 2, 3, 5});
  const Tensors weight = of_ranks({4, 5});
  const Tensors other = of_ranks({num_pieces(), size(), 2, 3, 4});
  const Tensors g = of_ranks({num_pieces(), 1, 2, 3, 4});
  for (const bool has_other : {false, true}) {
    std::vector<Tensors> inputs;
    for (int rank = 0; rank < size(); ++rank) {
      inputs.push_back({x[rank], weight[rank]});
      if (has_other) inputs.back().push_back(other[rank]);
    }
    const Outcome got =
        run_region(inputs, g, [&](const GroupPtr& group, const Tensors& in) {
          const int64_t before = group->traffic().num_calls;
          const at::Tensor sum = summed_linear(
              group, in[0], in[1],
              has_other ? std::optional<at::Tensor>(in[2]) : std::nullopt);
          EXPECT_EQ(group->traffic().num_calls, before + num_pieces());
          return sum;
        });
    Tensors terms;
    for (int rank = 0; rank < size(); ++rank) {
      terms.push_back(at::linear(x[rank], weight[rank]));
      if (has_other) terms.push_back(other[rank]);
    }
    const at::Tensor sum = sum_of(terms);
    const at::Tensor every = at::cat(g, 1);
    for (int rank = 0; rank < size(); ++rank) {
      expect_close(got.outputs[rank], sum.narrow(1, rank, 1), "sum");
      expect_close(got.grads[rank][0], at::matmul(every, weight[rank]), "x");
      expect_close(got.grads[rank][1], at::mm(flat(every).t(), flat(x[rank])),
                   "weight");
      if (has_other) expect_close(got.grads[rank][2], every, "other");
    }
  }
}

// ---- order -----------------------------------------------------------------

using Log = std::vector<std::string>;

class LoggedWork final : public comm::Work {
 public:
  LoggedWork(comm::WorkPtr inner, Log& log)
      : inner_(std::move(inner)), log_(log) {}
  bool done() override { return false; }  // only a wait ends it
  void wait(std::chrono::milliseconds timeout) override {
    log_.emplace_back("wait");
    inner_->wait(timeout);
  }

 private:
  const comm::WorkPtr inner_;
  Log& log_;
};

// Logs when collectives begin, and when they are waited for.
class Logged final : public comm::ForwardingCommunicator {
 public:
  Logged(comm::CommunicatorPtr inner, Log& log)
      : ForwardingCommunicator(std::move(inner)), log_(log) {}
  comm::WorkPtr all_gather(at::Tensor output,
                           const at::Tensor& input) override {
    log_.emplace_back("gather");
    return std::make_shared<LoggedWork>(inner_->all_gather(output, input),
                                        log_);
  }
  comm::WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                               comm::ReduceOp op) override {
    log_.emplace_back("sum");
    return std::make_shared<LoggedWork>(
        inner_->reduce_scatter(output, input, op), log_);
  }

 private:
  Log& log_;
};

thread_local Log* log_of_thread = nullptr;

// Logs the products of this thread.
class LogProducts {
 public:
  explicit LogProducts(Log& log) {
    log_of_thread = &log;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& f)
                                       -> std::unique_ptr<at::ObserverContext> {
          const std::string name = f.name();
          if (name == "aten::mm" || name == "aten::addmm") {
            log_of_thread->push_back("product");
          }
          return nullptr;
        }));
  }
  ~LogProducts() { at::removeCallback(handle_); }
  LogProducts(const LogProducts&) = delete;
  LogProducts& operator=(const LogProducts&) = delete;

 private:
  at::CallbackHandle handle_;
};

// The calls and waits of a function, in order; those of the first rank.
Log log_of(const std::function<void(const GroupPtr&)>& function) {
  Log first;
  comm::run_ranks(2, [&](int rank, const comm::CommunicatorPtr& comm) {
    Log log;
    const GroupPtr group =
        make_group(std::make_shared<Logged>(comm, log), comm);
    {
      const LogProducts products(log);
      function(group);
    }
    if (rank == 0) first = log;
  });
  return first;
}

TEST(PieceOrder, ProductsRunBesideTheGatherOfLaterPieces) {
  const Log log = log_of([](const GroupPtr& group) {
    const at::NoGradGuard no_grad;
    gathered_linears(group, randn({3, 1, 2, 2, 5}), {randn({4, 5})}, {{}}, 1,
                     {});
  });
  EXPECT_EQ(log, (Log{"gather", "gather", "gather", "wait", "product", "wait",
                      "product", "wait", "product"}));
}

TEST(PieceOrder, SumsRunBesideTheProductsOfLaterPieces) {
  const Log log = log_of([](const GroupPtr& group) {
    const at::NoGradGuard no_grad;
    summed_linear(group, randn({2, 2, 1, 2, 5}), randn({4, 5}), std::nullopt);
  });
  EXPECT_EQ(log, (Log{"product", "sum", "product", "sum", "wait", "wait"}));
}

TEST(PieceOrder, BackwardGathersAndSumsBesideProducts) {
  const Log log = log_of([](const GroupPtr& group) {
    at::Tensor x = randn({2, 1, 1, 2, 5}).requires_grad_();
    at::Tensor weight = randn({4, 5}).requires_grad_();
    const at::Tensor y =
        gathered_linears(group, x, {weight}, {at::Tensor()}, 1, {})[0];
    log_of_thread->clear();
    torch::autograd::grad({y.sum()}, {x, weight});
  });
  // Input gradients by piece, then that of the weight.
  EXPECT_EQ(log, (Log{"gather", "gather", "product", "sum", "product", "sum",
                      "wait", "wait", "product", "wait", "wait"}));
}

TEST(PieceOrder, BackwardOfASumMultipliesBesideTheGatherOfLaterPieces) {
  const Log log = log_of([](const GroupPtr& group) {
    at::Tensor x = randn({2, 2, 1, 2, 5}).requires_grad_();
    at::Tensor weight = randn({4, 5}).requires_grad_();
    const at::Tensor y = summed_linear(group, x, weight, std::nullopt);
    log_of_thread->clear();
    torch::autograd::grad({y.sum()}, {x, weight});
  });
  EXPECT_EQ(log, (Log{"gather", "gather", "wait", "product", "wait", "product",
                      "product"}));
}

}  // namespace
}  // namespace smp::tensor_parallel
