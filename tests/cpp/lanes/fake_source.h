#pragma once

#include "csrc/lanes/lane_table.h"
#include "tests/cpp/lanes/fake_times.h"

namespace smp::lanes {

/// Lanes of CPU tensors: a FakeLane, or an IpcLane and an NcclLane over copies
/// of the host.
LaneSource fake_source(const FakeOptions& options);

}  // namespace smp::lanes
