// Tests on which stream of a device gradients are added.

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/AutogradState.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <set>

#include "csrc/common/task_scope.h"
#include "csrc/gradients/reducer.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::gradients {
namespace {

constexpr int kHome = 1;

// A parameter on a device, whose reducer was made on the default stream.
class GradientStream : public testing::Test {
 protected:
  GradientStream() {
    // Backward runs on this thread, like in a pipeline.
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
  ~GradientStream() override {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(true);
  }

  at::Tensor result() const { return param.mul(2); }

  // Returns the streams that a step uses on its own one.
  std::set<int64_t> streams_of_step(const c10::Stream& stream,
                                    const at::Tensor& from_before = {}) {
    const c10::StreamGuard guard(stream);
    fake_device::reset();
    reducer.begin_step(1);
    {
      const TaskScope task({0, 0});
      const at::Tensor y = from_before.defined() ? from_before : result();
      torch::autograd::backward({y}, {at::ones({8}, param.options())});
    }
    reducer.end_step();
    std::set<int64_t> streams;
    for (const fake_device::Use& use : fake_device::uses()) {
      if (use.home == kHome) streams.insert(use.current_stream);
    }
    EXPECT_TRUE(param.grad().cpu().equal(at::full({8}, 2.)));
    param.mutable_grad().reset();
    return streams;
  }

  const at::Tensor param =
      at::zeros({8}, at::TensorOptions(fake_device::device(kHome)))
          .requires_grad_();
  Reducer reducer{
      {param}, {}, {whole_record(0, "p0", {8}, at::kFloat)}, nullptr, {}};
};

TEST_F(GradientStream, is_that_of_each_step) {
  for (int step = 0; step < 3; ++step) {
    const c10::Stream stream = fake_device::new_stream(kHome);
    EXPECT_EQ(streams_of_step(stream), std::set<int64_t>{stream.id()});
  }
}

// An accumulator made on another stream has no hook of the reducer.
TEST_F(GradientStream, of_a_graph_from_before_the_step_still_comes_here) {
  const at::Tensor before = result();
  const c10::Stream stream = fake_device::new_stream(kHome);
  EXPECT_EQ(streams_of_step(stream, before).count(0), 1);
}

}  // namespace
}  // namespace smp::gradients
