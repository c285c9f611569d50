#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "csrc/pipeline/call_record.h"

namespace smp::pipeline {

/// What the first part of a backward has left.
struct InputBackward {
  /// Of the inputs, in order; undefined where none came.
  std::vector<at::Tensor> input_grads;
  /// The second part: adds the gradients of parameters. Call once.
  std::function<void()> add_weight_grads;
};

/// Runs of a backward what the gradients of `inputs` need, and leaves those of
/// parameters for later; both parts together do what one backward would, each
/// operation once.
///
/// @param roots   of the local graph, none of them null
/// @param inputs  where it begins; null where no gradient is wanted
/// @return nothing, and nothing was run, if there is nothing to put off, or if
///     the graph must not be run in two parts: it has hooks, calls modules of
///     other ranks, or recomputes under a backward of its own
/// Source: arXiv:2401.10241; that the nodes shared by both parts are where the
/// second one begins is also how torch.distributed.pipelining does it.
std::optional<InputBackward> run_input_backward(
    const std::vector<GraphEdge>& roots,
    const std::vector<at::Tensor>& root_grads,
    const std::vector<GraphEdge>& inputs);

}  // namespace smp::pipeline
