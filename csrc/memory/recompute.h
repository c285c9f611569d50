#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

namespace smp::memory {

class ActivationStore;

struct RecomputeOptions {
  /// The result depends on something that requires a gradient, be it an input
  /// or not.
  bool needs_grad = true;
  /// The function draws the same random numbers again.
  bool preserve_random_state = true;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  /// Keeps the inputs meanwhile; null: they stay where they are.
  std::shared_ptr<ActivationStore> store;
};

/// Results may be undefined, without a gradient, or inputs themselves.
using RecomputedFunction =
    std::function<std::vector<at::Tensor>(std::vector<at::Tensor> inputs)>;

/// Runs `function` without a graph, and in backward once more with one, through
/// which the gradients then go. Only the inputs are kept. What the function
/// uses besides them, its parameters, gets gradients in that inner backward,
/// through its own hooks.
///
/// Random numbers of the second run are those of the first; grad mode is on in
/// it. Whatever else of the state of the thread matters is `function`'s affair.
/// Results that are floating-point tensors require a gradient.
///
/// @throws ValueError when the function changes an input in place, or returns
///     other tensors the second time; also in a backward for some tensors only
///     (torch.autograd.grad), since the parameters are not known here.
/// Differentiated once (`autograd::once`).
/// Source: arXiv:1604.06174; torch.utils.checkpoint with use_reentrant=True
/// works alike.
std::vector<at::Tensor> recompute(RecomputedFunction function,
                                  const std::vector<at::Tensor>& inputs,
                                  const RecomputeOptions& options);

/// Whether the calling thread runs a checkpointed function for its backward.
bool is_recomputing();

}  // namespace smp::memory
