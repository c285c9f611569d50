#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "csrc/comm/agreement.h"
#include "csrc/comm/communicator.h"

namespace smp::comm {

/// Overwrites tensors with those of group rank `root`, in flat pieces of one
/// dtype and device and of about `piece_bytes`. Takes any strides; no autograd.
/// Works in order of the list, so the pieces agree when the lists do.
/// Collective.
void broadcast_coalesced(const std::vector<at::Tensor>& tensors,
                         Communicator& group, int root, const WaitOptions& wait,
                         int64_t piece_bytes = 25 << 20);

}  // namespace smp::comm
