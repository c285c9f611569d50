#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/comm/group_wait.h"

namespace smp::bindings {

using FaultsPtr = std::shared_ptr<health::FaultBoard>;

/// Converts Python's seconds to the unit of all waits.
inline std::chrono::milliseconds to_ms(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

inline comm::WaitOptions make_wait_options(double timeout_s, FaultsPtr faults,
                                           std::vector<int> peers) {
  comm::WaitOptions wait;
  wait.timeout = to_ms(timeout_s);
  wait.faults = std::move(faults);
  wait.peers = std::move(peers);
  return wait;
}

}  // namespace smp::bindings
