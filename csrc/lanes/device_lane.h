#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "csrc/lanes/descriptor.h"
#include "csrc/memory/mark.h"

namespace smp::lanes {

/// A tensor that a lane has taken over.
struct Posted {
  Descriptor descriptor;
  /// Data that the message carries for the lane, on the CPU, valid from its
  /// mark on.
  memory::MarkedTensor payload;
  /// End of this rank's part of the copy, for records.
  memory::Mark end;
};

/// Moves data of tensors from this rank's device to other ranks' devices and
/// back, beside the messages, which carry descriptors in their place. Neither
/// side waits on the host: the sender reads its tensor in the order of its
/// current stream, the receiver gets a mark. Thread-safe.
///
/// Devices cannot wait for each other in a circle. A message leaves after the
/// work that makes its tensors was enqueued, and work is enqueued after the
/// messages of all its inputs have come (docs/design/device_lanes.md).
class DeviceLane {
 public:
  /// Sends `dst` the receipt that its slot is free; called by any thread.
  using SendReceipt = std::function<void(int dst, const Receipt& receipt)>;

  virtual ~DeviceLane() = default;  // after `stop`

  /// Takes over a dense tensor, in the order of the current stream: later work
  /// on that stream may write to it. If `is_stable`, it is never written to.
  /// Call it for each `dst` in the order in which messages leave.
  /// @return nothing when no slot is free
  virtual std::optional<Posted> post(int dst, const at::Tensor& data,
                                     bool is_stable) = 0;
  /// Returns memory on the CPU for the payload of a tensor that comes.
  virtual at::Tensor new_payload(const Descriptor& descriptor) const = 0;
  /// Returns whether `take` may block until the device or another rank has
  /// advanced. A thread that waits for nothing else must then call it.
  virtual bool take_may_block() const { return false; }
  /// Returns the tensor of a descriptor, detached. Call it in the order of
  /// messages.
  /// @throws Error when it is not the next tensor, and PeerFailure when it was
  ///         blocked and there is a fault
  virtual memory::MarkedTensor take(int src, const Descriptor& descriptor,
                                    at::Tensor payload) = 0;
  /// @throws Error when the slot is free already
  virtual void acknowledge(int src, const Receipt& receipt) = 0;
  /// Stops the lane. Tensors in flight will not arrive, and a `take` that
  /// another thread is blocked in ends soon.
  virtual void stop() = 0;
};

}  // namespace smp::lanes
