#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "csrc/common/task_scope.h"
#include "csrc/gradients/hooked_group.h"
#include "csrc/gradients/reducer.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/comm/stream_group.h"

namespace smp::gradients {

/// Parameters p0, p1, ... of `shapes`, all zero, with a reducer over them.
struct Rank {
  Rank(const std::vector<std::vector<int64_t>>& shapes,
       comm::CommunicatorPtr dp, Reducer::Options options,
       c10::ScalarType dtype = c10::ScalarType::Float) {
    const int dp_size = dp ? dp->size() : 1;
    // Hooks are called on the host.
    if (dp && !std::dynamic_pointer_cast<HookedGroup>(dp)) {
      options.control = dp;
      dp = comm::as_wanted(dp);
    }
    std::vector<ParameterRecord> records;
    for (size_t i = 0; i < shapes.size(); ++i) {
      params.push_back(at::full(shapes[i], 0, at::TensorOptions().dtype(dtype))
                           .requires_grad_());
      records.push_back(whole_record(static_cast<int>(i),
                                     "p" + std::to_string(i), shapes[i], dtype,
                                     dp_size));
    }
    reducer =
        std::make_unique<Reducer>(params, std::vector<at::Tensor>{}, records,
                                  std::move(dp), std::move(options));
  }

  /// A backward of microbatch `mb` that gives `grad` to parameter `i`.
  void contribute(int i, int mb, const at::Tensor& grad) {
    const TaskScope task({0, mb});
    torch::autograd::backward({params[i].mul(1)}, {grad});
  }
  void contribute(int i, int mb, double value) {
    contribute(i, mb, at::full_like(params[i].detach(), value));
  }

  /// First element of the gradient; all are equal in tests with numbers.
  double grad(int i) const {
    return params[i].grad().flatten()[0].item<double>();
  }
  bool has_grad(int i) const { return params[i].grad().defined(); }
  void zero_grad() {
    for (const at::Tensor& param : params) param.mutable_grad().reset();
  }

  std::vector<at::Tensor> params;
  std::unique_ptr<Reducer> reducer;
};

/// Small buckets, so that there are several.
inline Reducer::Options small_buckets() {
  Reducer::Options options;
  options.bucket_cap_bytes = 512;
  options.wait.timeout = std::chrono::seconds(20);
  return options;
}

}  // namespace smp::gradients
