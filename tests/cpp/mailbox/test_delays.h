#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "csrc/mailbox/substitutes.h"

namespace smp::mailbox {

/// Random pauses of the transport of one rank, so that tests meet orders of
/// arrival that are rare otherwise. A test sets them for the whole process,
/// or the environment does: SMP_TEST_DELAYS="<seed>:<max_us>".
class TestDelays {
 public:
  /// @throws ValueError when SMP_TEST_DELAYS is set to something else
  explicit TestDelays(int global_rank);

  /// Costs one relaxed load while there are no delays.
  void pause(PausePlace place) {
    if (max_us_.load(std::memory_order_relaxed) > 0) [[unlikely]]
      sleep(place);
  }

  /// From now on every rank of this process pauses, each in its own rhythm,
  /// which depends on nothing but `seed` and the number of the message.
  /// @param max_us  of one pause, in microseconds; 0: no pauses
  static void set(uint64_t seed, int64_t max_us);

 private:
  static constexpr int kNumPlaces = 3;

  void sleep(PausePlace place);

  static std::atomic<uint64_t> seed_;
  static std::atomic<int64_t> max_us_;

  const uint64_t global_rank_;
  std::array<std::atomic<uint64_t>, kNumPlaces> num_pauses_{};
};

}  // namespace smp::mailbox
