#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <string>

#include "csrc/comm/communicator.h"

namespace c10d {
class Backend;
}

namespace smp::comm {

/// A communicator over a torch.distributed backend. Group ranks are those of
/// the backend; nothing else may use the backend at the same time.
///
/// Gloo: CPU tensors. A wait that times out or is aborted leaves the
/// connections alone; a receive that was given up still takes the next message
/// of its source and tag. The backend's own time-out closes all connections of
/// the group, so give it one longer than any wait. `done` of a send or receive
/// costs a thread, because Gloo offers no test: prefer `wait`.
/// reduce_scatter is an all_reduce of a copy: not every supported release of
/// torch has it for Gloo.
///
/// NCCL: tags are ignored by the backend, so both sides must issue messages in
/// one order, and there is no recv_any. `wait` blocks the calling thread until
/// the device is done, and orders the current stream behind it. `abort` ends
/// the connections of the backend, on a thread of its own: kernels that wait
/// for a rank that is gone end with them.
///
/// @param name  words for errors and logs, for instance "gloo:dp"
/// @param end   ends what the backend has on its way, where the class Backend
///              of this release of torch cannot (before 2.7); any thread
CommunicatorPtr make_c10d_communicator(
    c10::intrusive_ptr<c10d::Backend> backend, std::string name,
    std::function<void()> end = nullptr);

}  // namespace smp::comm
