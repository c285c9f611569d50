#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

#include "csrc/health/fault_board.h"
#include "csrc/lanes/meeting_copies.h"
#include "tests/cpp/lanes/fake_times.h"

namespace smp::lanes {

/// The device of a rank with fake copies. It promises what CUDA does and no
/// more: it makes one copy at a time, in the order of asking, whatever streams
/// they are on.
struct FakeDevice {
  std::mutex allocator;  ///< held while a tensor is made
  std::atomic<uint64_t> num_asked{0};
  std::atomic<uint64_t> num_over{0};

  /// Waits, as an allocator that has no memory left, until the device has done
  /// everything that it was asked for, and holds the lock meanwhile.
  /// @return false if that took longer than `patience`
  bool find_memory(std::chrono::milliseconds patience);
};

/// Copies of CPU tensors for tests that move when both ranks, threads or
/// processes, have asked, through memory that both map. Each end of a channel
/// has a thread, whose copies end late, and none moves before those that
/// `device` was asked for earlier. A tensor that comes is full of NaN until
/// then. Ends that ask for different numbers of bytes are a fault. The first
/// copy of a channel is at once, and not counted by `num_ending`.
std::unique_ptr<MeetingCopies> make_fake_meeting(
    const FakeOptions& options, int global_rank,
    std::shared_ptr<health::FaultBoard> faults,
    std::shared_ptr<FakeDevice> device = std::make_shared<FakeDevice>());

}  // namespace smp::lanes
