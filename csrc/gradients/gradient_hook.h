#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/autograd/node.h"

namespace smp::gradients {

/// Takes gradients away from autograd before they reach `.grad`: a pre-hook on
/// the AccumulateGrad node of each leaf hands the gradient to `sink` and gives
/// the node nothing to accumulate. Hooks that users put on the tensor run
/// first. Gradients without strides (sparse) are handed over unchanged.
class GradientHooks {
 public:
  /// Called on the thread that runs the backward, without the GIL.
  using Sink = std::function<void(int param_idx, const at::Tensor& grad)>;

  /// @param params  leaves that require a gradient; later changes of device or
  ///                dtype detach the hooks
  GradientHooks(const std::vector<at::Tensor>& params, Sink sink);
  /// Gives the gradients back to autograd. Not while a backward runs.
  ~GradientHooks();
  /// Lets later graphs add on the current stream of the calling thread: an
  /// accumulator works on the stream on which it was made. Those that other
  /// code holds, such as an older graph, stay. Not while a backward runs.
  void use_current_stream();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

 private:
  autograd::NodePtr hooked_node(size_t param_idx) const;

  const std::vector<at::Tensor> params_;
  const std::shared_ptr<Sink> sink_;
  std::optional<c10::Stream> stream_;  // of all nodes; none on the CPU
  // Leaves know their node by a weak pointer only.
  std::vector<autograd::NodePtr> nodes_;
};

}  // namespace smp::gradients
