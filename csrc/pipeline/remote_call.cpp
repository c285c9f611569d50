#include "csrc/pipeline/remote_call.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "csrc/autograd/node.h"
#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

using torch::autograd::variable_list;

// The results exist before the node and their number varies, so this is a
// plain Node with edges to the arguments instead of an autograd::Function.
class RemoteCallNode : public torch::autograd::Node {
 public:
  RemoteCallNode(Caller& caller, IssuedCall call,
                 std::vector<bool> output_has_grad,
                 std::vector<TensorMeta> inputs,
                 torch::autograd::edge_list&& edges)
      : Node(std::move(edges)),
        caller_(caller),
        call_(std::move(call)),
        output_has_grad_(std::move(output_has_grad)),
        inputs_(std::move(inputs)) {}

  std::string name() const override { return "SmpRemoteCallBackward"; }

  // May wait inside the engine. That is safe because each context runs its
  // backward on a thread of its own (multithreaded backward is off for it).
  variable_list apply(variable_list&& grads) override {
    SMP_CHECK_VALUE(!at::GradMode::is_enabled(),
                    "create_graph=True is not supported through a module on "
                    "another rank (global_rank ",
                    call_.owner_rank, ")");
    // Only results with gradients are inputs of this node, in order.
    std::vector<at::Tensor> all(output_has_grad_.size());
    size_t next = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      if (output_has_grad_[i]) all[i] = std::move(grads[next++]);
    }
    auto refs = caller_.call_backward(call_, inputs_, all);
    for (size_t i = 0; i < refs.size(); ++i) {
      if (!task_should_compute_output(i)) refs[i] = nullptr;
    }
    return caller_.tensors().make_handles(refs);
  }

 private:
  Caller& caller_;
  const IssuedCall call_;
  const std::vector<bool> output_has_grad_;
  const std::vector<TensorMeta> inputs_;
};

// Ends the backward on a rank that is not the driver; the driver runs the real
// backward.
class UnusedGradNode : public torch::autograd::Node {
 public:
  std::string name() const override { return "SmpModelOutputBackward"; }
  variable_list apply(variable_list&&) override { return {}; }
};

// Connects a handle to its data.
class FetchNode : public torch::autograd::Node {
 public:
  using Node::Node;
  std::string name() const override { return "SmpFetchBackward"; }
  variable_list apply(variable_list&& grads) override {
    return std::move(grads);
  }
};

// The node of a view that stays a view of a handle (custom functions bypass the
// Python function protocol, through which views become local ones).
class AwayViewNode : public torch::autograd::Node {
 public:
  using Spread = std::function<at::Tensor(const at::Tensor&)>;
  AwayViewNode(Spread spread, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), spread_(std::move(spread)) {}
  std::string name() const override { return "SmpViewBackward"; }
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) return {at::Tensor()};
    return {spread_(grads[0])};
  }

 private:
  const Spread spread_;
};

}  // namespace

void link_view(const at::Tensor& view, const at::Tensor& base,
               std::function<at::Tensor(const at::Tensor&)> spread) {
  if (!base.requires_grad() || !at::GradMode::is_enabled()) return;
  at::Tensor output = view;
  torch::autograd::create_gradient_edge(
      output,
      autograd::make_node<AwayViewNode>(
          std::move(spread), torch::autograd::collect_next_edges(base)));
}

void require_unused_grad(at::Tensor& output) {
  torch::autograd::create_gradient_edge(output,
                                        autograd::make_node<UnusedGradNode>());
}

at::Tensor materialize(TensorDirectory& tensors, const at::Tensor& handle) {
  const RemoteRefPtr ref = remote_ref_of(handle);
  at::Tensor data = tensors.fetch_to_own(ref);
  ref->is_local = true;
  if (handle.requires_grad()) {
    auto edges = torch::autograd::collect_next_edges(handle);
    torch::autograd::create_gradient_edge(
        data, autograd::make_node<FetchNode>(std::move(edges)));
  }
  return data;
}

RemoteResult remote_call(Caller& caller, int owner_global_rank,
                         int64_t module_id, bool training,
                         const std::string& structure, const std::string& mode,
                         const std::vector<at::Tensor>& inputs) {
  const bool grad = at::GradMode::is_enabled();
  int64_t flags = 0;
  if (grad) flags |= kGradEnabled;
  if (training) flags |= kTraining;
  for (const at::Tensor& input : inputs) {
    if (!input.is_contiguous()) flags |= kStrided;
  }
  IssuedCall call = caller.call_forward(owner_global_rank, module_id, flags,
                                        structure, mode, inputs);
  RemoteResult result;
  result.structure = call.expected->result.structure;
  result.shares_memory = call.expected->result.shares_memory;
  result.views = call.expected->result.views;
  result.changed_args = call.expected->result.changed_args;
  std::vector<bool> output_has_grad;
  bool any = false;
  result.tensors = caller.tensors().make_handles(call.results);
  for (const RemoteRefPtr& ref : call.results) {
    output_has_grad.push_back(ref && grad && ref->meta.requires_grad);
    any = any || output_has_grad.back();
  }
  call.results.clear();  // the handles hold them
  if (!any) return result;
  std::vector<TensorMeta> metas;
  for (const at::Tensor& input : inputs) metas.push_back(TensorMeta::of(input));
  auto node = autograd::make_node<RemoteCallNode>(
      caller, std::move(call), output_has_grad, std::move(metas),
      torch::autograd::collect_next_edges(inputs));
  for (size_t i = 0; i < result.tensors.size(); ++i) {
    if (output_has_grad[i]) {
      torch::autograd::create_gradient_edge(result.tensors[i], node);
    }
  }
  return result;
}

}  // namespace smp::pipeline
