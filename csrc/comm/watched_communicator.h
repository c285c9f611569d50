#pragma once

#include <memory>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/flight_watch.h"
#include "csrc/health/fault_board.h"

namespace smp::comm {

/// Makes a communicator that numbers the collectives of `inner` in the log of
/// the board. The search for deadlocks can then tell a collective that all
/// ranks have entered from others. The works have these numbers and the board,
/// so that `wait_within` ends with a fault.
///
/// If collectives run on streams of a device, `flights` watches those for which
/// the host does not wait. After a fault no further ones begin.
///
/// @param ranks    global ranks of the group, in the order of group ranks
/// @param flights  watch of the same board; may be null
CommunicatorPtr make_watched_communicator(
    CommunicatorPtr inner, std::shared_ptr<health::FaultBoard> faults,
    std::vector<int> ranks, FlightWatchPtr flights = nullptr);

}  // namespace smp::comm
