#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <string>

#include "csrc/comm/communicator.h"

namespace c10d {
class Backend;
}

namespace smp::comm {

struct C10dOptions {
  /// Device of the tensors, current in the thread that ends the backend.
  c10::Device device = c10::kCPU;
  /// Ends the backend's operations in flight if its class cannot (torch before
  /// 2.7). Called from any thread.
  std::function<void()> end = nullptr;
};

/// Makes a communicator over a torch.distributed backend. Group ranks are those
/// of the backend; nothing else may use the backend at the same time.
///
/// Gloo: CPU tensors. A wait that times out or is aborted leaves the
/// connections alone; a receive that was given up still takes the next message
/// of its source and tag. The backend's own time-out closes all connections of
/// the group, so it must be longer than any wait. `done` of a send or receive
/// costs a thread, because Gloo offers no test: prefer `wait`. reduce_scatter
/// is an all_reduce of a copy: Gloo lacks it in some supported releases of
/// torch.
///
/// NCCL: works keep their tensors until they are destroyed, because the backend
/// forgets them once any stream is ordered. The backend ignores tags, so both
/// sides must issue messages in one order. `wait` blocks the calling thread
/// until the device is done, and orders the current stream after the operation.
/// `abort` ends the connections of the backend, on a thread of its own: kernels
/// that wait for a lost rank end with them.
///
/// @param name  words for errors and logs, for instance "gloo:dp"
CommunicatorPtr make_c10d_communicator(
    c10::intrusive_ptr<c10d::Backend> backend, std::string name,
    C10dOptions options = {});

}  // namespace smp::comm
