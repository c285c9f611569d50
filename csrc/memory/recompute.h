#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

namespace smp::memory {

class ActivationStore;

struct RecomputeOptions {
  /// The result depends on a tensor that requires a gradient, be it an input or
  /// not.
  bool needs_grad = true;
  /// The second run draws the same random numbers again.
  bool preserve_random_state = true;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  /// Keeps the inputs until the backward; null: they stay in place.
  std::shared_ptr<ActivationStore> store;
};

/// The function to run twice. Results may be undefined, without a gradient, or
/// inputs themselves.
using RecomputedFunction =
    std::function<std::vector<at::Tensor>(std::vector<at::Tensor> inputs)>;

/// Runs `function` without a graph, and in backward once more with a graph,
/// through which the gradients then pass. Keeps only the inputs. Parameters
/// that the function uses besides them get gradients in that inner backward,
/// through their own hooks.
///
/// The second run has the random numbers of the first, and grad mode is on in
/// it. `function` has to restore any other state of the thread. Results that
/// are floating-point tensors require a gradient.
///
/// @throws ValueError when the function changes an input in place, or returns
///         other tensors the second time; also in a backward for some tensors
///         only (torch.autograd.grad), since the parameters are unknown here.
/// Can be differentiated once (`autograd::once`). Source: arXiv:1604.06174;
/// torch.utils.checkpoint with use_reentrant=True works alike.
std::vector<at::Tensor> recompute(RecomputedFunction function,
                                  const std::vector<at::Tensor>& inputs,
                                  const RecomputeOptions& options);

/// Returns whether the calling thread runs a checkpointed function for its
/// backward.
bool is_recomputing();

}  // namespace smp::memory
