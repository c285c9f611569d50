#pragma once

#include <memory>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/flight_watch.h"
#include "csrc/health/fault_board.h"

namespace smp::comm {

/// `inner`, whose collectives are numbered in the log of the board: code that
/// looks for deadlocks can tell a collective that all ranks have entered from
/// one that some rank will not enter. The works know their numbers, and the
/// board, so that `wait_within` ends with a fault.
///
/// Where collectives run on streams of a device, `flights` watches those that
/// the host does not wait for; after a fault no further ones begin.
///
/// @param ranks    global ranks of the group, in the order of group ranks
/// @param flights  of the same board; may be null
CommunicatorPtr make_watched_communicator(
    CommunicatorPtr inner, std::shared_ptr<health::FaultBoard> faults,
    std::vector<int> ranks, FlightWatchPtr flights = nullptr);

}  // namespace smp::comm
