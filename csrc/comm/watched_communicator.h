#pragma once

#include <memory>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/health/fault_board.h"

namespace smp::comm {

/// `inner`, whose collectives are numbered in the log of the board: code that
/// looks for deadlocks can tell a collective that all ranks have entered from
/// one that some rank will not enter. The works know their numbers.
///
/// @param ranks  global ranks of the group, in the order of group ranks
CommunicatorPtr make_watched_communicator(
    CommunicatorPtr inner, std::shared_ptr<health::FaultBoard> faults,
    std::vector<int> ranks);

}  // namespace smp::comm
