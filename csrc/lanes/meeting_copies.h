#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <string>
#include <vector>

#include "csrc/memory/mark.h"

namespace smp::lanes {

/// A stream of copies from one rank to another one. A pair of ranks has several
/// per direction.
struct CopyChannel {
  int src = -1;   ///< global rank
  int dst = -1;   ///< likewise
  int index = 0;  ///< among the pair's channels in this direction

  auto operator<=>(const CopyChannel&) const = default;
};

/// Makes copies between devices that need both ranks. A copy moves once both
/// ends of its channel have enqueued it, in the order in which each end
/// enqueues, and ends at both together. NcclLane makes all calls of NCCL
/// through this class, and tests substitute it. Thread-safe, but one thread at
/// a time may use a channel.
class MeetingCopies {
 public:
  virtual ~MeetingCopies() = default;  // after `stop`

  /// Returns data that the other ends of these channels need before `connect`;
  /// a byte string without secrets. @throws Error when the channels cannot be
  /// made here
  virtual std::string offer(const std::vector<CopyChannel>& channels) = 0;
  /// Makes this rank's end of a channel. Both ends call it before its first
  /// copy, all ranks in the order of channels. May wait for the other end.
  /// @param offer_of_peer  offer of the rank at the other end
  /// @throws Error when there will be no copies
  virtual void connect(const CopyChannel& channel,
                       const std::string& offer_of_peer) = 0;

  /// Enqueues this end's part of the next copy of a channel from this rank,
  /// after the earlier work of this thread's current stream. `data` is
  /// contiguous and must not be written to before the end. May block while the
  /// driver takes no work.
  /// @return end of the copy  @throws Error after `stop`, or when it is refused
  virtual memory::Mark send(const CopyChannel& channel,
                            const at::Tensor& data) = 0;
  /// Enqueues the same for a channel to this rank, after earlier copies of the
  /// channel only.
  /// @return a new tensor and its mark
  virtual memory::MarkedTensor receive(const CopyChannel& channel,
                                       at::IntArrayRef sizes,
                                       at::ScalarType dtype) = 0;

  /// Cuts off copies in flight here, which then never end, and calls that are
  /// blocked. Any thread may call it, also twice. Throws nothing.
  virtual void stop() = 0;
};

}  // namespace smp::lanes
