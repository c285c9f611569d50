#include "csrc/pipeline/served_graph.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace smp::pipeline {
namespace {

const void* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.numel() > 0
             ? tensor.storage().unsafeGetStorageImpl()
             : nullptr;
}

// Gives the gradients of results to their graph and keeps none of them while
// the graph runs, as code that calls the engine with gradients does.
class ResultGradsNode : public torch::autograd::Node {
 public:
  ResultGradsNode(torch::autograd::variable_list grads,
                  torch::autograd::edge_list edges)
      : Node(std::move(edges)), grads_(std::move(grads)) {}
  std::string name() const override { return "SmpResultGradsBackward"; }
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&&) override {
    return std::exchange(grads_, {});
  }

 private:
  torch::autograd::variable_list grads_;
};

}  // namespace

bool passes_grad(const at::Tensor& tensor) {
  return tensor.requires_grad() && (tensor.grad_fn() || !tensor.is_view());
}

void find_shared(const std::vector<at::Tensor>& arguments,
                 const std::vector<mailbox::MessageTensor>& results,
                 bool callers_are_contiguous, ResultMeta& meta) {
  for (size_t i = 0; i < results.size(); ++i) {
    const at::Tensor& result = results[i].data;
    const void* const storage = storage_of(result);
    if (!storage) continue;
    bool is_view = false;
    for (size_t j = 0; j < arguments.size() && !is_view; ++j) {
      if (storage_of(arguments[j]) != storage) continue;
      if (result.scalar_type() == arguments[j].scalar_type() &&
          arguments[j].is_contiguous() && callers_are_contiguous &&
          passes_grad(result) == passes_grad(arguments[j])) {
        is_view = true;
        meta.views.push_back(
            {static_cast<int>(i), static_cast<int>(j), result.sizes().vec(),
             result.strides().vec(),
             result.storage_offset() - arguments[j].storage_offset()});
      } else {
        meta.shares_memory = true;
      }
    }
    for (size_t j = 0; j < i && !is_view; ++j) {
      if (storage_of(results[j].data) == storage) meta.shares_memory = true;
    }
  }
}

void run_backward_of(const std::vector<GraphEdge>& roots,
                     std::vector<at::Tensor> root_grads) {
  if (roots.empty()) return;
  torch::autograd::edge_list edges;
  for (const GraphEdge& root : roots) {
    edges.emplace_back(root.node, root.input_nr);
  }
  const at::Tensor begin = at::zeros({}, root_grads[0].options());
  const auto feed = autograd::make_node<ResultGradsNode>(std::move(root_grads),
                                                         std::move(edges));
  feed->add_input_metadata(begin);
  torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::Edge(feed, 0)}, {begin}, /*keep_graph=*/false,
      /*create_graph=*/false, /*accumulate_grad=*/true);
}

}  // namespace smp::pipeline
