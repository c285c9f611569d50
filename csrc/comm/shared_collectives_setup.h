#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// @param areas  memory of each rank; see `CollectiveMemory`
CommunicatorPtr make_shared_communicator(
    CommunicatorPtr inner, std::vector<std::shared_ptr<uint8_t>> areas);

}  // namespace smp::comm
