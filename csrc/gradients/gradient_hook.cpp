#include "csrc/gradients/gradient_hook.h"

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "csrc/common/check.h"
#include "csrc/memory/device_scope.h"

namespace smp::gradients {

namespace {

class TakingHook final : public torch::autograd::FunctionPreHook {
 public:
  TakingHook(std::weak_ptr<GradientHooks::Sink> sink, int param_idx)
      : sink_(std::move(sink)), param_idx_(param_idx) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& grads) override {
    const auto sink = sink_.lock();
    if (!sink || !grads[0].defined()) return grads;
    // The gradient may still be on another rank: reading it may suspend this
    // thread, which must not happen under the locks of the code that adds it
    // up.
    const bool is_away = grads[0].unsafeGetTensorImpl()->is_python_dispatch();
    (*sink)(param_idx_, is_away ? at::clone(grads[0]) : grads[0]);
    // AccumulateGrad returns at once when its gradient is undefined.
    return {at::Tensor()};
  }

  bool belongs_to(const std::shared_ptr<GradientHooks::Sink>& sink) const {
    return !sink_.owner_before(sink) && !sink.owner_before(sink_);
  }

 private:
  const std::weak_ptr<GradientHooks::Sink> sink_;
  const int param_idx_;
};

std::optional<c10::Stream> stream_for(const std::vector<at::Tensor>& params) {
  if (params.empty()) return std::nullopt;
  return memory::current_stream(params.front().device());
}

}  // namespace

GradientHooks::GradientHooks(const std::vector<at::Tensor>& params, Sink sink)
    : params_(params),
      sink_(std::make_shared<Sink>(std::move(sink))),
      stream_(stream_for(params)) {
  nodes_.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) nodes_.push_back(hooked_node(i));
}

autograd::NodePtr GradientHooks::hooked_node(size_t param_idx) const {
  auto node = torch::autograd::impl::grad_accumulator(params_[param_idx]);
  SMP_ASSERT(node, "parameter ", param_idx, " has no gradient accumulator");
  node->add_pre_hook(
      std::make_unique<TakingHook>(sink_, static_cast<int>(param_idx)));
  return node;
}

void GradientHooks::use_current_stream() {
  const std::optional<c10::Stream> stream = stream_for(params_);
  if (stream == stream_) return;
  bool all_moved = true;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i]->input_metadata(0).stream() == *stream) continue;
    if (nodes_[i].use_count() > 1) {
      all_moved = false;
      continue;
    }
    nodes_[i].reset();  // else the leaf would return the same one
    nodes_[i] = hooked_node(i);
  }
  if (all_moved) stream_ = stream;
}

GradientHooks::~GradientHooks() {
  for (const auto& node : nodes_) {
    std::erase_if(node->pre_hooks(), [this](const auto& hook) {
      const auto* ours = dynamic_cast<const TakingHook*>(hook.get());
      return ours != nullptr && ours->belongs_to(sink_);
    });
  }
}

}  // namespace smp::gradients
