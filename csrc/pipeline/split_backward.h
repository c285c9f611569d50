#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "csrc/pipeline/call_record.h"

namespace smp::pipeline {

/// The outcome of the first part of a backward.
struct InputBackward {
  /// Gradients of the inputs, in order; undefined where none came.
  std::vector<at::Tensor> input_grads;
  /// The second part: adds the gradients of parameters. Call once.
  std::function<void()> add_weight_grads;
};

/// Runs the part of a backward that the gradients of `inputs` need, and leaves
/// the gradients of parameters for later. Both parts together do what one
/// backward would do, each operation once.
///
/// @param roots   outputs of the local graph; none is null
/// @param inputs  inputs of the local graph; null where no gradient is wanted
/// @return nothing, and nothing was run, if there is nothing to put off, or if
///     the graph must not be run in two parts: it has hooks, calls modules of
///     other ranks, or recomputes under a backward of its own
/// Source: arXiv:2401.10241; torch.distributed.pipelining also begins the
/// second part at the nodes that both parts share.
std::optional<InputBackward> run_input_backward(
    const std::vector<GraphEdge>& roots,
    const std::vector<at::Tensor>& root_grads,
    const std::vector<GraphEdge>& inputs);

}  // namespace smp::pipeline
