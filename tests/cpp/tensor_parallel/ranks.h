#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/tensor_parallel/regions.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/comm/stream_group.h"

namespace smp::tensor_parallel {

using Tensors = std::vector<at::Tensor>;

inline at::Tensor randn(std::vector<int64_t> shape) {
  return at::randn(shape, at::TensorOptions(at::kDouble));
}

inline at::Tensor sum_of(const Tensors& tensors) {
  at::Tensor sum = tensors[0].clone();
  for (size_t i = 1; i < tensors.size(); ++i) sum.add_(tensors[i]);
  return sum;
}

/// The results of each rank.
struct Outcome {
  Tensors outputs;
  std::vector<Tensors> grads;  ///< [rank][input]
};

inline GroupPtr make_group(const comm::CommunicatorPtr& communicator,
                           comm::CommunicatorPtr control = nullptr) {
  comm::WaitOptions wait;
  wait.timeout = std::chrono::seconds(20);
  if (!control) control = communicator;
  return std::make_shared<Group>(comm::as_wanted(communicator),
                                 std::move(control), communicator->group_rank(),
                                 communicator->size(), std::move(wait));
}

/// Runs `region(group, inputs of the rank)` on every rank of an in-process
/// world, and a backward with `output_grads` of the rank.
inline Outcome run_region(
    const std::vector<Tensors>& inputs, const Tensors& output_grads,
    const std::function<at::Tensor(const GroupPtr&, const Tensors&)>& region) {
  const auto size = static_cast<int>(inputs.size());
  Outcome outcome{Tensors(size), std::vector<Tensors>(size)};
  comm::run_ranks(size, [&](int rank, const comm::CommunicatorPtr& comm) {
    const GroupPtr group = make_group(comm);
    Tensors leaves;
    for (const at::Tensor& input : inputs[rank]) {
      leaves.push_back(input.detach().requires_grad_());
    }
    const at::Tensor output = region(group, leaves);
    outcome.outputs[rank] = output.detach();
    outcome.grads[rank] =
        torch::autograd::grad({output}, leaves, {output_grads[rank]});
  });
  return outcome;
}

inline void expect_close(const at::Tensor& got, const at::Tensor& expected,
                         const std::string& what) {
  ASSERT_EQ(got.sizes().vec(), expected.sizes().vec()) << what;
  EXPECT_TRUE(at::allclose(got, expected, 1e-12, 1e-12))
      << what << ": got " << got << " expected " << expected;
}

inline std::string text_of_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace smp::tensor_parallel
