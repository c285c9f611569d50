#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <string>
#include <vector>

#include "csrc/memory/mark.h"

namespace smp::lanes {

/// A stream of copies from one rank to another one. A pair of ranks has
/// several, apart from each other and by direction.
struct Way {
  int src = -1;   ///< global rank
  int dst = -1;   ///< likewise
  int index = 0;  ///< among those of the pair in this direction

  auto operator<=>(const Way&) const = default;
};

/// Copies between devices that need both ranks: one moves when it was asked for
/// at both ends of its way, in the order in which each end has asked, and ends
/// at both together. All that NcclLane asks of NCCL, or what stands for it in
/// tests. Thread-safe, but for a way, which one thread at a time uses.
class MeetingCopies {
 public:
  virtual ~MeetingCopies() = default;  // after `stop`

  /// What the other ends of these ways have to know before `connect`; a byte
  /// string without secrets. @throws Error when they cannot be made here
  virtual std::string offer(const std::vector<Way>& ways) = 0;
  /// Makes this rank's end of a way. Both ends call it before its first copy,
  /// all ranks in the order of ways. May wait for the other one.
  /// @param offer_of_peer  of the rank at the other end
  /// @throws Error when there will be no copies
  virtual void connect(const Way& way, const std::string& offer_of_peer) = 0;

  /// Asks for this end's part of the next copy of a way from this rank, after
  /// what was asked of the current stream of this thread; nobody may write to
  /// `data`, which is contiguous, before the end. May block while the driver
  /// takes no work.
  /// @return its end  @throws Error after `stop`, or when it is refused
  virtual memory::Mark send(const Way& way, const at::Tensor& data) = 0;
  /// The same of a way to this rank, after copies of it and nothing else.
  /// @return a new tensor and its mark
  virtual memory::MarkedTensor receive(const Way& way, at::IntArrayRef sizes,
                                       at::ScalarType dtype) = 0;

  /// Cuts off what is in flight here, which ends nowhere then, and calls that
  /// are blocked. Any thread; may be called twice.
  virtual void stop() = 0;
};

}  // namespace smp::lanes
