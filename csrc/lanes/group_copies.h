#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "csrc/comm/communicator.h"
#include "csrc/comm/flight_watch.h"
#include "csrc/health/fault_board.h"
#include "csrc/lanes/meeting_copies.h"

namespace smp::lanes {

/// What copies between devices of different hosts are made of.
struct GroupOptions {
  /// A communicator of the two ranks of a way, its source first, that is
  /// ordered by streams and shares no stream of a device with another one.
  /// Both call it; any thread. Empty: there are none.
  std::function<comm::CommunicatorPtr(const Way& way)> make = {};
  /// Watches what no host waits for; of the board of this rank.
  comm::FlightWatchPtr flights = {};
};

/// Each way is a group of two ranks, of NCCL on GPUs. A send comes after what
/// was asked of the caller's stream, a receive after nothing. Tensors are kept
/// until their copies are over, since groups use streams that nobody knows.
/// Never ran on a device.
std::unique_ptr<MeetingCopies> make_group_copies(
    c10::Device device, int global_rank, GroupOptions options,
    std::shared_ptr<health::FaultBoard> faults);

}  // namespace smp::lanes
