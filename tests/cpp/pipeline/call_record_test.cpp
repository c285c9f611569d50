#include "csrc/pipeline/call_record.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/autograd/node.h"
#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

// The end of a graph that holds something.
class Holder : public torch::autograd::Node {
 public:
  explicit Holder(std::shared_ptr<void> held) : held_(std::move(held)) {}
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&&) override {
    return {};
  }

 private:
  std::shared_ptr<void> held_;
};

CallRecord of_microbatch(int64_t mb, std::shared_ptr<void> held = nullptr) {
  CallRecord record;
  record.mb = mb;
  record.outputs = {{autograd::make_node<Holder>(std::move(held)), 0}};
  return record;
}

TEST(CallRecords, a_record_is_taken_once_by_caller_and_request) {
  CallRecords records;
  records.put({0, 7}, of_microbatch(3));
  records.put({1, 7}, of_microbatch(4));
  EXPECT_EQ(records.take({0, 7}).mb, 3);
  EXPECT_EQ(records.take({1, 7}).mb, 4);
  EXPECT_EQ(records.size(), 0);
  try {
    records.take({1, 7});
    FAIL() << "no error";
  } catch (const Error& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("call 7 of global_rank 1"), std::string::npos) << text;
    EXPECT_NE(text.find("model.backward once"), std::string::npos) << text;
  }
}

TEST(CallRecords, the_end_of_a_microbatch_frees_what_got_no_gradient) {
  CallRecords records;
  const auto held = std::make_shared<int>(0);
  records.put({0, 1}, of_microbatch(3, held));
  records.put({0, 2}, of_microbatch(4));
  records.drop_microbatch(3);
  EXPECT_EQ(records.size(), 1);
  EXPECT_EQ(held.use_count(), 1);
  records.clear();
  EXPECT_EQ(records.size(), 0);
}

// A graph may hold anything; what is freed with it must not find the lock
// taken.
TEST(CallRecords, a_graph_that_is_freed_may_use_the_records) {
  CallRecords records;
  std::vector<int64_t> sizes;
  for (const int way : {0, 1}) {
    const auto note = [&](int* held) {
      sizes.push_back(records.size());
      delete held;
    };
    records.put({0, 1},
                of_microbatch(0, std::shared_ptr<int>(new int(0), note)));
    way == 0 ? records.clear() : records.drop_microbatch(0);
  }
  EXPECT_EQ(sizes, (std::vector<int64_t>{0, 0}));
}

TEST(DenseGrad, gradients_are_made_dense) {
  const at::Tensor expanded = at::ones({}).expand({2, 3});
  EXPECT_TRUE(dense_grad(expanded).is_contiguous());
  const at::Tensor transposed = at::ones({2, 3}).t();
  EXPECT_TRUE(dense_grad(transposed).is_same(transposed));
  EXPECT_FALSE(dense_grad({}).defined());
}

TEST(CallRecords, threads_put_and_take_their_own) {
  CallRecords records;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      for (int64_t id = 0; id < 300; ++id) {
        records.put({rank, id}, of_microbatch(id));
        EXPECT_EQ(records.take({rank, id}).mb, id);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(records.size(), 0);
}

}  // namespace
}  // namespace smp::pipeline
