#include "csrc/parameters/parameter_scope.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/without_throwing.h"

namespace smp::parameters {
namespace {

thread_local std::vector<ParameterScope*> scopes_of_thread;

// Kinds of passes outside of steps; those of steps are not negative.
constexpr int64_t kForwardOnly = -1;
constexpr int64_t kForwardAndBackward = -2;

class ResultHook final : public torch::autograd::FunctionPreHook {
 public:
  ResultHook(std::shared_ptr<BackwardUses> uses, BackwardUsePtr use)
      : uses_(std::move(uses)), use_(std::move(use)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& grads) override {
    uses_->begin(use_);
    if (at::GradMode::is_enabled()) keep_for_second_backward();
    return grads;
  }

 private:
  // Keeps the units when this backward makes a graph of its own (create_graph).
  // No node that would hold the units again runs first in that graph.
  void keep_for_second_backward() const {
    for (const int unit : use_->units) {
      SMP_CHECK(ParameterScope::read(*uses_, unit),
                "a backward with create_graph=True needs sharded parameters "
                "until the second backward is over; call both inside of a step "
                "function");
    }
  }

  const std::shared_ptr<BackwardUses> uses_;
  const BackwardUsePtr use_;
};

bool in_backward() { return torch::autograd::get_current_graph_task_id() >= 0; }

}  // namespace

ParameterScope::ParameterScope(std::shared_ptr<BackwardUses> uses,
                               std::vector<int> units, bool is_forward)
    : uses_(std::move(uses)), first_node_(at::sequence_number::peek()) {
  if (is_forward && scopes_of_thread.empty()) begin_passing();
  uses_->store()->hold(units);
  units_ = std::move(units);
  scopes_of_thread.push_back(this);
}

ParameterScope::~ParameterScope() {
  if (has_left_) return;
  std::erase(scopes_of_thread, this);
  // Gathering ahead may fail. Code that needs the unit gets the error.
  without_throwing("the release of parameters",
                   [this] { uses_->store()->release(units_); });
}

// Outside of a step each outermost forward begins a pass.
void ParameterScope::begin_passing() const {
  ParameterStore& store = *uses_->store();
  if (in_backward() || store.in_lasting_pass()) return;
  store.begin_pass(
      at::GradMode::is_enabled() ? kForwardAndBackward : kForwardOnly,
      /*is_passing=*/true);
}

bool ParameterScope::holds(int unit) const {
  return std::find(units_.begin(), units_.end(), unit) != units_.end();
}

bool ParameterScope::read(const BackwardUses& uses, int unit) {
  ParameterScope* innermost = nullptr;
  for (auto it = scopes_of_thread.rbegin(); it != scopes_of_thread.rend();
       ++it) {
    if ((*it)->uses_.get() != &uses) continue;
    if ((*it)->holds(unit)) return true;
    if (innermost == nullptr) innermost = *it;
  }
  if (innermost == nullptr) return false;
  uses.store()->hold({unit});
  innermost->units_.push_back(unit);
  return true;
}

void ParameterScope::leave(const std::vector<at::Tensor>& results) {
  SMP_ASSERT(!has_left_ && !scopes_of_thread.empty() &&
                 scopes_of_thread.back() == this,
             "scopes are left in the opposite order of entering");
  has_left_ = true;
  scopes_of_thread.pop_back();
  if (at::GradMode::is_enabled() && !units_.empty()) expect_backward(results);
  hand_on(results);
  uses_->store()->release(units_);
  if (scopes_of_thread.empty() && !at::GradMode::is_enabled()) {
    uses_->store()->end_passing();
  }
}

void ParameterScope::expect_backward(
    const std::vector<at::Tensor>& results) const {
  const auto use = std::make_shared<BackwardUse>();
  use->units = units_;
  use->first = first_node_;
  use->thread = std::this_thread::get_id();
  bool has_backward = false;
  for (const at::Tensor& result : results) {
    if (!result.requires_grad() || result.is_leaf()) continue;
    begin_before(*result.grad_fn(), use);
    // Code that changes a view in place cuts its own node out of the graph.
    if (result.is_view() && is_from_here(result._base())) {
      begin_before(*result._base().grad_fn(), use);
    }
    has_backward = true;
  }
  use->end = at::sequence_number::peek();
  if (has_backward && in_backward()) uses_->keep(use);
}

void ParameterScope::begin_before(torch::autograd::Node& node,
                                  const BackwardUsePtr& use) const {
  node.add_tensor_pre_hook(std::make_unique<ResultHook>(uses_, use));
}

bool ParameterScope::is_from_here(const at::TensorBase& tensor) const {
  return tensor.requires_grad() && !tensor.is_leaf() &&
         tensor.grad_fn()->sequence_nr() >= first_node_;
}

// Hands units that a result shows to the outer scope, which frees them.
void ParameterScope::hand_on(const std::vector<at::Tensor>& results) {
  const auto around = std::find_if(
      scopes_of_thread.rbegin(), scopes_of_thread.rend(),
      [this](const ParameterScope* scope) { return scope->uses_ == uses_; });
  if (around == scopes_of_thread.rend()) return;
  for (const at::Tensor& result : results) {
    for (const int unit : uses_->store()->units_shown_by(result, units_)) {
      std::erase(units_, unit);
      (*around)->units_.push_back(unit);
    }
  }
}

}  // namespace smp::parameters
