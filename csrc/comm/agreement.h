#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/group_wait.h"

namespace smp::comm {

/// All-reduces small integers and returns the maxima. Collective.
/// @param group  of the host, because the host waits: one of a device would
///               make it wait for the device
std::vector<int64_t> agree_on_maxima(Communicator& group,
                                     const std::vector<int64_t>& values,
                                     const Patience& patience,
                                     const std::string& what);

/// A byte string of every rank, by group rank; any sizes. Collective.
/// @param group  of the host
std::vector<std::string> gather_bytes(Communicator& group,
                                      const std::string& bytes,
                                      const Patience& patience,
                                      const std::string& what);

/// Numbers of all ranks, by group rank: [size, n] of [n], on the same device.
/// The host does not wait for a device. Collective.
at::Tensor gather_numbers(Communicator& group, const at::Tensor& numbers,
                          const Patience& patience, const std::string& what);

/// Compares a description of something that all ranks must have equal; costs
/// two integers when they do. Collective.
/// @param group  of the host
/// @throws ValueError on every rank, naming the first line that differs
void require_equal_lines(Communicator& group,
                         const std::vector<std::string>& lines,
                         const Patience& patience, const std::string& what);

}  // namespace smp::comm
