#pragma once

#include <string>
#include <vector>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// Communicators of `size` ranks that are threads of this process, so that
/// code for many ranks runs in one test binary. CPU tensors only.
///
/// A send copies its tensor and is finished at once. When sizes or dtypes of
/// the two sides differ, the receiver (collectives: every rank) gets an Error
/// that names both.
/// @return one communicator per group rank, in order
std::vector<CommunicatorPtr> make_local_world(int size,
                                              std::string name = "local");

}  // namespace smp::comm
