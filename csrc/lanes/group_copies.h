#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "csrc/comm/communicator.h"
#include "csrc/comm/flight_watch.h"
#include "csrc/health/fault_board.h"
#include "csrc/lanes/meeting_copies.h"

namespace smp::lanes {

/// The parts from which copies between devices of different hosts are made.
struct GroupOptions {
  /// Makes a communicator of the two ranks of a channel, its source first. It
  /// is ordered by streams and shares no stream of a device with another one.
  /// Both ranks call it, from any thread. Empty: there are no such
  /// communicators.
  std::function<comm::CommunicatorPtr(const CopyChannel& channel)> make = {};
  /// Watch for operations without a waiting host; of this rank's board.
  comm::FlightWatchPtr flights = {};
};

/// Makes copies in which each channel is a group of two ranks, of NCCL on GPUs.
/// A send comes after the earlier work of the caller's stream, a receive after
/// nothing. Tensors are kept until their copies are over, since groups use
/// streams of their own. Has never run on a device.
std::unique_ptr<MeetingCopies> make_group_copies(
    c10::Device device, int global_rank, GroupOptions options,
    std::shared_ptr<health::FaultBoard> faults);

}  // namespace smp::lanes
