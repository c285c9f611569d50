#include "csrc/memory/recompute.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "csrc/autograd/graph_begin.h"
#include "csrc/autograd/node.h"
#include "csrc/autograd/once.h"
#include "csrc/common/check.h"
#include "csrc/common/task_scope.h"
#include "csrc/common/without_throwing.h"
#include "csrc/memory/activation_store.h"
#include "csrc/memory/random_state.h"

namespace smp::memory {
namespace {

using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr const char* kName = "a checkpointed module";

thread_local bool recomputing = false;

/// Sets the state of the thread for a second run, and restores it afterwards.
class RecomputeScope {
 public:
  RecomputeScope(const std::optional<RandomState>& random_state,
                 c10::Device device, const Task& task)
      : task_scope_(task), grad_mode_(true), previous_(recomputing) {
    recomputing = true;
    if (!random_state) return;
    outside_ = RandomState::capture(device);
    random_state->restore();
  }
  ~RecomputeScope() {
    recomputing = previous_;
    if (!outside_) return;
    without_throwing("restoring random numbers behind a recomputation",
                     [&] { outside_->restore(); });
  }
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

 private:
  const TaskScope task_scope_;
  const at::AutoGradMode grad_mode_;
  const bool previous_;
  std::optional<RandomState> outside_;
};

/// The inputs of a recomputed call until its backward.
class KeptInputs {
 public:
  KeptInputs(const std::vector<at::Tensor>& inputs, ActivationStore* store,
             ActivationId id)
      : id_(id) {
    std::vector<at::Tensor> tensors = inputs;
    if (store) kept_ = store->keep(id, tensors);
    for (const at::Tensor& tensor : tensors) {
      saved_.emplace_back(tensor, /*is_output=*/false);
    }
  }

  std::vector<at::Tensor> unpack(ActivationStore* store) {
    std::vector<at::Tensor> tensors(saved_.size());
    if (store) {
      store->begin_backward(id_);
      tensors = store->tensors_of(*kept_);
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].defined()) tensors[i] = saved_[i].unpack();
    }
    return tensors;
  }

 private:
  const ActivationId id_;
  std::shared_ptr<ActivationStore::Kept> kept_;
  std::vector<SavedVariable> saved_;
};

/// The data of a second run besides inputs.
struct Recipe {
  RecomputedFunction function;
  RecomputeOptions options;
  std::optional<RandomState> random_state;
  Task task;
  std::vector<bool> input_has_grad;
  /// Indices of the results that pass through the node.
  std::vector<size_t> outputs;
  size_t num_results = 0;
};

class RecomputeNode : public Node {
 public:
  RecomputeNode(Recipe recipe, std::unique_ptr<KeptInputs> inputs,
                torch::autograd::edge_list&& edges)
      : Node(std::move(edges)),
        recipe_(std::move(recipe)),
        inputs_(std::move(inputs)) {}

  std::string name() const override { return "SmpRecomputeBackward"; }

  variable_list apply(variable_list&& grads) override {
    SMP_CHECK_VALUE(
        Engine::get_default_engine().is_checkpoint_valid(), kName,
        " gets a backward for some tensors only (torch.autograd.grad, or "
        "backward(inputs=...)); its parameters get their gradients in a "
        "backward for all of them: call loss.backward() or model.backward()");
    // Kept with create_graph=True only; otherwise their memory is to be freed.
    const variable_list outer =
        at::GradMode::is_enabled() ? grads : variable_list();
    variable_list results = run(std::move(grads));
    return autograd::once(kName, std::move(results), outer);
  }

  void release_variables() override {
    std::unique_ptr<KeptInputs> inputs;  // ends without the lock
    std::lock_guard<std::mutex> lock(mutex_);
    inputs.swap(inputs_);
  }

 private:
  std::vector<at::Tensor> unpack() {
    std::lock_guard<std::mutex> lock(mutex_);
    SMP_CHECK_VALUE(inputs_, kName,
                    " gets a second backward, and its inputs were let go of "
                    "after the first one; pass retain_graph=True to that");
    std::vector<at::Tensor> inputs =
        inputs_->unpack(recipe_.options.store.get());
    if (!torch::autograd::get_current_graph_task_keep_graph()) inputs_.reset();
    return inputs;
  }

  variable_list run(variable_list grads) {
    // Gradients may still be on another rank. Reading them may suspend this
    // thread, which must not happen while all activations are there.
    for (at::Tensor& grad : grads) {
      if (grad.defined() && grad.unsafeGetTensorImpl()->is_python_dispatch()) {
        grad = at::clone(grad);
      }
    }
    std::vector<autograd::NodePtr> begins(recipe_.input_has_grad.size());
    std::vector<at::Tensor> outputs = recompute(begins);
    torch::autograd::edge_list roots;
    variable_list root_grads;
    for (size_t i = 0; i < recipe_.outputs.size(); ++i) {
      const at::Tensor& output = outputs[recipe_.outputs[i]];
      if (!grads[i].defined() || !output.requires_grad()) continue;
      roots.push_back(torch::autograd::impl::gradient_edge(output));
      root_grads.push_back(std::move(grads[i]));
    }
    grads.clear();
    outputs.clear();
    if (!roots.empty()) {
      const at::AutoGradMode no_grad(false);
      Engine::get_default_engine().execute(
          roots, root_grads, /*keep_graph=*/false, /*create_graph=*/false,
          /*accumulate_grad=*/true);
    }
    variable_list results(begins.size());
    for (size_t i = 0; i < begins.size(); ++i) {
      if (begins[i]) results[i] = autograd::take_grad(*begins[i]);
    }
    return results;
  }

  std::vector<at::Tensor> recompute(std::vector<autograd::NodePtr>& begins) {
    std::vector<at::Tensor> inputs = unpack();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].defined()) continue;
      inputs[i] = inputs[i].detach();
      if (recipe_.input_has_grad[i]) {
        begins[i] = autograd::begin_graph(inputs[i]);
      }
    }
    const RecomputeScope scope(recipe_.random_state, recipe_.options.device,
                               recipe_.task);
    std::vector<at::Tensor> outputs = recipe_.function(std::move(inputs));
    SMP_CHECK_VALUE(outputs.size() == recipe_.num_results, kName, " returned ",
                    outputs.size(), " tensors when it was computed again, and ",
                    recipe_.num_results,
                    " before; it must do the same both times");
    for (size_t i = 0; i < recipe_.outputs.size(); ++i) {
      const at::Tensor& output = outputs[recipe_.outputs[i]];
      const auto& before = input_metadata(static_cast<uint32_t>(i));
      SMP_CHECK_VALUE(output.defined() && before.is_same_shape(output), kName,
                      " returned a tensor of shape ",
                      output.defined() ? output.sizes() : at::IntArrayRef(),
                      " when it was computed again, and ",
                      before.shape_as_dim_vector(),
                      " before; it must do the same both times");
    }
    return outputs;
  }

  Recipe recipe_;
  std::mutex mutex_;
  std::unique_ptr<KeptInputs> inputs_;  // null after the backward
};

// Returns aliases with the same storage outside of the graph: the function must
// not attach anything to its caller's tensors.
std::vector<at::Tensor> aliases_of(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> aliases;
  for (const at::Tensor& input : inputs) {
    aliases.push_back(input.defined() ? input.detach() : at::Tensor());
  }
  return aliases;
}

std::vector<at::Tensor> run_forward(const RecomputedFunction& function,
                                    const std::vector<at::Tensor>& inputs) {
  std::vector<uint32_t> versions;
  for (const at::Tensor& input : inputs) {
    versions.push_back(
        input.defined() && !input.is_inference() ? input._version() : 0);
  }
  std::vector<at::Tensor> aliases = aliases_of(inputs);
  const at::AutoGradMode no_grad(false);
  std::vector<at::Tensor> results = function(aliases);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || inputs[i].is_inference()) continue;
    SMP_CHECK_VALUE(
        static_cast<uint32_t>(inputs[i]._version()) == versions[i], kName,
        " changed its tensor argument number ", i,
        " in place, which its second run begins with; let it change "
        "a copy (inplace=False, .clone()), or do not checkpoint it");
    for (at::Tensor& result : results) {
      if (aliases[i].defined() && result.is_same(aliases[i])) {
        result = inputs[i];
      }
    }
  }
  return results;
}

bool passes_grad(const at::Tensor& result) {
  // A result that requires a gradient already is an input, or was made before.
  return result.defined() && !result.requires_grad() &&
         (result.is_floating_point() || result.is_complex());
}

bool is_one_of(const at::Tensor& result,
               const std::vector<at::Tensor>& inputs) {
  for (const at::Tensor& input : inputs) {
    if (result.is_same(input)) return true;
  }
  return false;
}

}  // namespace

bool is_recomputing() { return recomputing; }

std::vector<at::Tensor> recompute(RecomputedFunction function,
                                  const std::vector<at::Tensor>& inputs,
                                  const RecomputeOptions& options) {
  if (!at::GradMode::is_enabled() || !options.needs_grad) {
    return function(inputs);
  }
  Recipe recipe;
  recipe.options = options;
  recipe.task = current_task();
  if (options.preserve_random_state) {
    recipe.random_state = RandomState::capture(options.device);
  }
  ActivationStore* const store = options.store.get();
  const ActivationId id = store ? store->begin_forward() : ActivationId();
  std::vector<at::Tensor> results = run_forward(function, inputs);
  recipe.num_results = results.size();
  for (size_t i = 0; i < results.size(); ++i) {
    if (passes_grad(results[i]) && !is_one_of(results[i], inputs)) {
      recipe.outputs.push_back(i);
    }
  }
  if (recipe.outputs.empty()) return results;
  recipe.function = std::move(function);
  for (const at::Tensor& input : inputs) {
    recipe.input_has_grad.push_back(input.defined() && input.requires_grad());
  }
  const std::vector<size_t> outputs = recipe.outputs;
  auto node = autograd::make_node<RecomputeNode>(
      std::move(recipe), std::make_unique<KeptInputs>(inputs, store, id),
      torch::autograd::collect_next_edges(inputs));
  for (const size_t i : outputs) {
    results[i] = results[i].detach();  // may be a view, or another owner's
    torch::autograd::create_gradient_edge(results[i], node);
  }
  return results;
}

}  // namespace smp::memory
