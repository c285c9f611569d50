#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/pipeline/caller.h"

namespace smp::pipeline {

/// The result of a remote call, as its caller sees it.
struct RemoteResult {
  std::string structure;  ///< pickled results without tensors
  /// Handles: true shape, dtype and graph, with the data elsewhere. Undefined
  /// for views of arguments.
  std::vector<at::Tensor> tensors;
  /// Arguments that the module changed in place; their new values are the last
  /// of `tensors`.
  std::vector<int> changed_args;
  std::vector<ViewOfArgument> views;
  bool shares_memory = false;  ///< see ResultMeta
};

/// Calls a module that lives on another rank as one differentiable operation.
/// Forward runs there; backward sends the gradients of the results there and
/// gets handles of the arguments' gradients. Grad mode decides whether a graph
/// is kept. Returns at once when calls like this one were seen before.
///
/// @param mode    further state that decides the result, see
///     Caller::call_forward
/// @param inputs  tensors of `structure`, each once; handles or ordinary ones
/// Source: algorithms of the public smp v1 guide; the node is ours.
RemoteResult remote_call(Caller& caller, int owner_global_rank,
                         int64_t module_id, bool training,
                         const std::string& structure, const std::string& mode,
                         const std::vector<at::Tensor>& inputs);

/// Returns the data of a handle as an ordinary tensor that follows the handle
/// in the graph: PyTorch handles views of it and in-place changes.
at::Tensor materialize(TensorDirectory& tensors, const at::Tensor& handle);

/// Connects the handle of a view to the graph of its base.
/// @param spread  computes the gradient of the base from that of the view
void link_view(const at::Tensor& view, const at::Tensor& base,
               std::function<at::Tensor(const at::Tensor&)> spread);

/// Makes a tensor of the driver's output on another rank require a gradient
/// that is dropped. Unlike a leaf it may be changed in place.
void require_unused_grad(at::Tensor& output);

}  // namespace smp::pipeline
