#pragma once

#include <string>
#include <vector>

#include "csrc/pipeline/server.h"

namespace smp::pipeline {

/// Calls a module that lives on another rank as one differentiable operation:
/// forward runs there and its results come back, backward sends their
/// gradients there and gets those of the arguments. Grad mode decides whether
/// a graph is kept. Blocks only the calling context.
///
/// @param inputs  tensors of `structure`, each once; may require gradients
/// @return the pickled structure of the results and their tensors; floating
///         results require gradients exactly if they did at the owner
/// Source: algorithms of the public smp v1 guide; the node is ours.
Call remote_call(Server& server, int owner_global_rank, int64_t module_id,
                 bool training, std::string structure,
                 const std::vector<at::Tensor>& inputs);

/// Makes a received output of the model require a gradient that goes nowhere,
/// on ranks other than the driver. Unlike a leaf it may be changed in place.
void require_unused_grad(at::Tensor& output);

}  // namespace smp::pipeline
