#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "csrc/mailbox/message.h"
#include "csrc/pipeline/call_record.h"
#include "csrc/pipeline/result_cache.h"

namespace smp::pipeline {

/// Returns whether gradients pass through a tensor. A view made without
/// gradients of a tensor that requires them claims to require them, and has no
/// graph.
bool passes_grad(const at::Tensor& tensor);

/// Finds results that are views of arguments, and notes whether others share
/// memory with arguments or with each other.
/// @param callers_are_contiguous  whether the arguments are contiguous at their
///     caller
void find_shared(const std::vector<at::Tensor>& arguments,
                 const std::vector<mailbox::MessageTensor>& results,
                 bool callers_are_contiguous, ResultMeta& meta);

/// Adds gradients of leaves, and brings gradients of arguments to their nodes.
/// @param root_grads  one per root; not kept while the graph runs
void run_backward_of(const std::vector<GraphEdge>& roots,
                     std::vector<at::Tensor> root_grads);

}  // namespace smp::pipeline
