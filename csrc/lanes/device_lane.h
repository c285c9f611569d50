#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "csrc/lanes/descriptor.h"
#include "csrc/memory/mark.h"

namespace smp::lanes {

/// A tensor as a lane has taken it over.
struct Posted {
  Descriptor descriptor;
  /// What the message has to carry for the lane, on the CPU, from its mark on.
  memory::MarkedTensor payload;
  /// When this rank's part of the copy is over, for who records it.
  memory::Mark end;
};

/// Moves data of tensors from this rank's device to those of others and back,
/// beside the messages, which carry descriptors in their place. Neither side
/// waits on the host: the sender reads its tensor in the order of its current
/// stream, the receiver gets a mark. Thread-safe.
///
/// Why devices cannot wait for each other in a circle: a message leaves after
/// the work that makes its tensors was asked for, and work is asked for after
/// the messages of all its inputs have come (docs/design/device_lanes.md).
class DeviceLane {
 public:
  /// Tells `dst` that its slot is free; any thread.
  using SendReceipt = std::function<void(int dst, const Receipt& receipt)>;

  virtual ~DeviceLane() = default;  // after `stop`

  /// Takes over a dense tensor, in the order of the current stream: what is
  /// asked of that afterwards may write to it, unless `is_stable`, when nobody
  /// writes. For each `dst` in the order in which messages leave.
  /// @return nothing when no slot is free
  virtual std::optional<Posted> post(int dst, const at::Tensor& data,
                                     bool is_stable) = 0;
  /// Memory on the CPU for the payload of a tensor that comes.
  virtual at::Tensor new_payload(const Descriptor& descriptor) const = 0;
  /// Whether `take` may block until the device or another rank has got further.
  /// A thread that waits for nothing else calls it then.
  virtual bool take_may_block() const { return false; }
  /// The tensor of a descriptor, detached. In the order of messages.
  /// @throws Error when it is not the one that comes next, and PeerFailure when
  ///     it was blocked and there is a fault
  virtual memory::MarkedTensor take(int src, const Descriptor& descriptor,
                                    at::Tensor payload) = 0;
  /// @throws Error when the slot is free already
  virtual void acknowledge(int src, const Receipt& receipt) = 0;
  /// Nothing follows; what is in flight will not arrive. A `take` that another
  /// thread is blocked in ends soon.
  virtual void stop() = 0;
};

}  // namespace smp::lanes
