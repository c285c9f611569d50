#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/group_wait.h"

namespace smp::comm {

/// All-reduces small integers and returns the maxima. Collective.
/// @param group  group for host tensors; with one for device tensors the host
///               would also wait for the device
std::vector<int64_t> agree_on_maxima(Communicator& group,
                                     const std::vector<int64_t>& values,
                                     const WaitOptions& wait,
                                     const std::string& what);

/// Gathers a byte string of any size from every rank, by group rank.
/// Collective.
/// @param group  group for host tensors
std::vector<std::string> gather_bytes(Communicator& group,
                                      const std::string& bytes,
                                      const WaitOptions& wait,
                                      const std::string& what);

/// Gathers numbers of all ranks, by group rank: [size, n] from [n], on the same
/// device. The host does not wait for a device. Collective.
at::Tensor gather_numbers(Communicator& group, const at::Tensor& numbers,
                          const WaitOptions& wait, const std::string& what);

/// Compares lines that must be equal on all ranks; costs two integers when they
/// are. Collective.
/// @param group  group for host tensors
/// @throws ValueError on every rank, naming the first line that differs
void require_equal_lines(Communicator& group,
                         const std::vector<std::string>& lines,
                         const WaitOptions& wait, const std::string& what);

}  // namespace smp::comm
