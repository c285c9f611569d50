#pragma once

#include <memory>

#include "csrc/health/fault_board.h"
#include "csrc/lanes/device_copies.h"
#include "tests/cpp/lanes/fake_times.h"

namespace smp::lanes {

/// Memory of the host in place of a device, shared with other processes and
/// with ranks that are threads of this one, and two threads in place of
/// streams: what they are asked for they do in order and late. New memory and
/// tensors are full of NaN, and so is a slot that has been read, so that what
/// is read too early, twice, or written too early, changes numbers. Waits for
/// an event take the records that were asked for before, as those of CUDA do.
std::unique_ptr<DeviceCopies> make_fake_copies(
    const FakeOptions& options, int global_rank,
    std::shared_ptr<health::FaultBoard> faults);

}  // namespace smp::lanes
