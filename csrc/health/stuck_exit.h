#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "csrc/health/fault_board.h"
#include "csrc/health/liveness_frame.h"

namespace smp::health {

/// Part of a client: ends a rank that is stuck. Such a rank does not look at
/// the fault, and would stay behind when the others have ended. Used by one
/// thread.
class StuckExit {
 public:
  struct Options {
    /// Makes the script raise. Called when the fault alone has changed nothing
    /// for a second.
    std::function<void()> interrupt_script;
    /// Time after the interrupt before `exit_process` is called, if nothing has
    /// changed.
    std::chrono::milliseconds exit_after;
    std::function<void()> exit_process;
  };

  StuckExit(std::shared_ptr<FaultBoard> faults, Options options);

  /// Returns whether the fault is that this rank is stuck.
  bool is_stuck() const;
  /// Interrupts or ends the process when it is time. Progress restarts the
  /// time, as does a wait that begins or ends.
  /// @param status  current status
  void check(const LivenessFrame& status);

 private:
  using Clock = std::chrono::steady_clock;

  const std::shared_ptr<FaultBoard> faults_;
  const Options options_;
  std::optional<LivenessFrame> status_;  // from when it was found to be stuck
  Clock::time_point since_;
  bool is_interrupted_ = false;
};

}  // namespace smp::health
