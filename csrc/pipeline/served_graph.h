#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "csrc/mailbox/message.h"
#include "csrc/pipeline/call_record.h"
#include "csrc/pipeline/result_cache.h"

namespace smp::pipeline {

/// Whether gradients pass. A view that was made without gradients of something
/// that has them says that it requires them, and has no graph.
bool passes_grad(const at::Tensor& tensor);

/// Finds results that are views of arguments, and says of others whether they
/// share memory with arguments or with each other.
/// @param callers_are_contiguous  the arguments, where they came from
void find_shared(const std::vector<at::Tensor>& arguments,
                 const std::vector<mailbox::MessageTensor>& results,
                 bool callers_are_contiguous, ResultMeta& meta);

/// Adds gradients of leaves, and brings those of arguments to their nodes.
/// @param root_grads  one per root; kept by nobody while the graph runs
void run_backward_of(const std::vector<GraphEdge>& roots,
                     std::vector<at::Tensor> root_grads);

}  // namespace smp::pipeline
