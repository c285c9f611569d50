#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/comm/communicator.h"

namespace smp::shm {

/// @param areas  memory of each rank; see `CollectiveMemory`
comm::CommunicatorPtr make_shared_communicator(
    comm::CommunicatorPtr inner, std::vector<std::shared_ptr<uint8_t>> areas);

}  // namespace smp::shm
