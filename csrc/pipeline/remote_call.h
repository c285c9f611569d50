#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/pipeline/caller.h"

namespace smp::pipeline {

/// What a remote call looks like to its caller.
struct RemoteResult {
  std::string structure;  ///< pickled results without tensors
  /// Handles: true shape, dtype and graph, data elsewhere. Undefined for views
  /// of arguments.
  std::vector<at::Tensor> tensors;
  /// Arguments that the module changed in place; what they are now are the
  /// last of `tensors`.
  std::vector<int> changed_args;
  std::vector<ViewOfArgument> views;
  bool shares_memory = false;  ///< see ResultMeta
};

/// Calls a module that lives on another rank as one differentiable operation:
/// forward runs there, backward sends the gradients of the results there and
/// gets handles of those of the arguments. Grad mode decides whether a graph is
/// kept. Returns at once when calls like this one were seen before.
///
/// @param mode    what else the result depends on, see Caller::call_forward
/// @param inputs  tensors of `structure`, each once; handles or ordinary ones
/// Source: algorithms of the public smp v1 guide; the node is ours.
RemoteResult remote_call(Caller& caller, int owner_global_rank,
                         int64_t module_id, bool training,
                         const std::string& structure, const std::string& mode,
                         const std::vector<at::Tensor>& inputs);

/// The data behind a handle as an ordinary tensor that hangs on the handle in
/// the graph: views of it and in-place changes are PyTorch's own affair.
at::Tensor materialize(TensorDirectory& tensors, const at::Tensor& handle);

/// Hangs the handle of a view on the graph of its base.
/// @param spread  gradient of the base from that of the view
void link_view(const at::Tensor& view, const at::Tensor& base,
               std::function<at::Tensor(const at::Tensor&)> spread);

/// A tensor of the driver's output on another rank: requires a gradient that
/// goes nowhere. Unlike a leaf it may be changed in place.
void require_unused_grad(at::Tensor& output);

}  // namespace smp::pipeline
