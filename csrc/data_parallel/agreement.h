#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/fault_board.h"

namespace smp::data_parallel {

/// How to wait for other ranks.
struct Patience {
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  std::shared_ptr<comm::FaultBoard> faults;  ///< ends waits; may be null
  std::vector<int> peers;  ///< global ranks of the group; empty: unknown
  /// A fault or a farewell may come later than what it does to connections.
  std::chrono::milliseconds grace = std::chrono::seconds(2);
};

/// Waits for an operation.
/// @param what  words for the error, for instance "reduction of bucket 3"
/// @throws PeerFailure on a fault or when a peer has left; Error when the
///         operation fails or `patience.timeout` passes
void wait_for(comm::Work& work, const Patience& patience,
              const comm::Communicator& group, const std::string& what);

/// All-reduces small integers and returns the maxima. Collective.
std::vector<int64_t> agree_on_maxima(comm::Communicator& group,
                                     const std::vector<int64_t>& values,
                                     at::Device device,
                                     const Patience& patience,
                                     const std::string& what);

/// Compares a description of something that all ranks must have equal; costs
/// two integers when they do. Collective.
/// @throws ValueError on every rank, naming the first line that differs
void require_equal_lines(comm::Communicator& group,
                         const std::vector<std::string>& lines,
                         at::Device device, const Patience& patience,
                         const std::string& what);

}  // namespace smp::data_parallel
