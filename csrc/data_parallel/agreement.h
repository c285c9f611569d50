#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "csrc/comm/communicator.h"

namespace smp::data_parallel {

/// How to wait for other ranks.
struct Patience {
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Called at least every 100 ms; throws when waiting has become pointless.
  std::function<void()> check;
};

/// Waits for an operation.
/// @param what  words for the error, for instance "reduction of bucket 3"
/// @throws Error when it fails or `patience.timeout` passes, and whatever
///         `patience.check` throws
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
