#pragma once

#include <memory>

#include "csrc/health/fault_board.h"
#include "csrc/lanes/meeting_copies.h"
#include "tests/cpp/lanes/fake_times.h"

namespace smp::lanes {

/// Copies of CPU tensors for tests that move when both ranks, threads or
/// processes, have asked, through memory that both map. Each end of a channel
/// has a thread that plays its stream: its copies end late and in order, and
/// none moves before the copies ahead of it. A tensor that comes is full of NaN
/// until then. Ends that ask for different numbers of bytes are a fault. The
/// first copy of a channel is at once, and not counted by `num_ending`.
std::unique_ptr<MeetingCopies> make_fake_meeting(
    const FakeOptions& options, int global_rank,
    std::shared_ptr<health::FaultBoard> faults);

}  // namespace smp::lanes
