#include "csrc/pipeline/remote_call.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

using torch::autograd::variable_list;

// The results exist before the node and their number varies, so this is a
// plain Node with edges to the arguments instead of an autograd::Function.
class RemoteCallNode : public torch::autograd::Node {
 public:
  RemoteCallNode(Server* server, CallId id, std::vector<bool> output_has_grad,
                 torch::autograd::edge_list&& edges)
      : Node(std::move(edges)),
        server_(server),
        id_(id),
        output_has_grad_(std::move(output_has_grad)) {}

  std::string name() const override { return "SmpRemoteCallBackward"; }

  // Blocks inside the engine. That is safe because each context runs its
  // backward on a thread of its own (multithreaded backward is off for it).
  variable_list apply(variable_list&& grads) override {
    SMP_CHECK_VALUE(!at::GradMode::is_enabled(),
                    "create_graph=True is not supported through a module on "
                    "another rank (global_rank ",
                    id_.owner_rank, ")");
    // Only results with gradients are inputs of this node, in order.
    std::vector<at::Tensor> all(output_has_grad_.size());
    size_t next = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      if (output_has_grad_[i]) all[i] = grads[next++];
    }
    return server_->call_backward(id_, all);
  }

 private:
  Server* const server_;
  const CallId id_;
  const std::vector<bool> output_has_grad_;
};

// The driver runs the real backward; here it ends.
class UnusedGradNode : public torch::autograd::Node {
 public:
  std::string name() const override { return "SmpModelOutputBackward"; }
  variable_list apply(variable_list&&) override { return {}; }
};

}  // namespace

void require_unused_grad(at::Tensor& output) {
  torch::autograd::create_gradient_edge(output,
                                        std::make_shared<UnusedGradNode>());
}

Call remote_call(Server& server, int owner_global_rank, int64_t module_id,
                 bool training, std::string structure,
                 const std::vector<at::Tensor>& inputs) {
  const bool grad = at::GradMode::is_enabled();
  Call call;
  call.module_id = module_id;
  if (grad) call.flags |= kGradEnabled;
  if (training) call.flags |= kTraining;
  call.structure = std::move(structure);
  call.tensors.resize(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.tensors[i].data = inputs[i].detach();
    call.tensors[i].requires_grad = grad && inputs[i].requires_grad();
  }
  auto [result, id] = server.call_forward(owner_global_rank, std::move(call));
  if (!grad) return std::move(result);

  std::vector<bool> output_has_grad;
  bool any = false;
  for (const comm::MessageTensor& tensor : result.tensors) {
    output_has_grad.push_back(tensor.requires_grad);
    any = any || tensor.requires_grad;
  }
  if (!any) return std::move(result);
  auto node = std::make_shared<RemoteCallNode>(
      &server, id, std::move(output_has_grad),
      torch::autograd::collect_next_edges(inputs));
  for (comm::MessageTensor& tensor : result.tensors) {
    if (tensor.requires_grad) {
      torch::autograd::create_gradient_edge(tensor.data, node);
    }
  }
  return std::move(result);
}

}  // namespace smp::pipeline
