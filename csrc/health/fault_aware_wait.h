#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "csrc/health/fault_board.h"

namespace smp::health {

/// A description of a wait: words for messages, and the ranks it needs.
struct WaitSpec {
  std::string what;  ///< for instance "recv_from(1)"
  std::chrono::milliseconds timeout;
  /// Returns the global ranks that have to act before the wait can end; empty:
  /// unknown. Called with the lock of the wait held.
  std::function<std::vector<int>()> missing = {};
  std::string hint = {};  ///< what to do after a time-out
};

/// A wait on a condition variable that also ends, by an exception, on a fault,
/// when a rank it needs has left, at its time-out, and on Ctrl-C. The owner of
/// the condition variable subscribes a wake to the board, so that the wait sees
/// faults at once; otherwise it sees them within `kSlice`.
///
/// Make the object before taking the lock.
class FaultAwareWait {
 public:
  /// Time after which the absence of a rank counts. News of its goodbye may
  /// arrive on the liveness channel before its last messages arrive on theirs.
  static constexpr std::chrono::milliseconds kLeftGrace{2000};
  /// Time after which a fault counts. News of a failure may also be faster than
  /// messages the rank sent before, such as the reason why all ranks are to
  /// raise.
  static constexpr std::chrono::milliseconds kFaultGrace{100};
  /// Longest time between two checks of signals, faults and the clock.
  static constexpr std::chrono::milliseconds kSlice{200};

  FaultAwareWait(FaultBoard& board, WaitSpec spec);

  /// Returns when `pred` (called with the lock held) is true.
  /// @throws PeerFailure on a fault or when a missing rank has left; Error at
  ///         the time-out; what the interrupt check throws. The lock is held.
  template <typename Pred>
  void until(std::unique_lock<std::mutex>& lock, std::condition_variable& cv,
             Pred pred) {
    while (!pred()) {
      check(lock);
      if (pred()) break;  // `check` may have released the lock
      cv.wait_until(lock, next_look());
    }
    blocked_.update(false, {});
  }

 private:
  using Clock = std::chrono::steady_clock;

  void check(std::unique_lock<std::mutex>& lock);
  void check_left(std::unique_lock<std::mutex>& lock,
                  const std::vector<int>& missing, Clock::time_point now);
  Clock::time_point next_look() const;
  std::string describe(const std::vector<int>& missing) const;

  FaultBoard& board_;
  const WaitSpec spec_;
  const Clock::time_point deadline_;
  Clock::time_point next_interrupt_check_;
  std::optional<Clock::time_point> left_since_;
  std::optional<Clock::time_point> faulted_since_;
  BlockedScope blocked_;
};

/// Reports that `global_rank`, which has left, is needed here, and raises. Call
/// it without locks that subscribers of the board need.
/// @throws PeerFailure
[[noreturn]] void fail_because_left(FaultBoard& board, int global_rank,
                                    const std::string& what);

/// Returns " 0 2 5" for {0, 2, 5}.
std::string list_ranks(const std::vector<int>& ranks);

}  // namespace smp::health
