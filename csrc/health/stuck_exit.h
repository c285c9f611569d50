#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "csrc/health/fault_board.h"
#include "csrc/health/liveness_frame.h"

namespace smp::health {

/// Part of a client: the end of a rank that is stuck. It does not look at the
/// fault, and would stay behind when the others have ended. One thread.
class StuckExit {
 public:
  struct Options {
    /// Makes the script raise, when the fault alone has changed nothing for a
    /// second.
    std::function<void()> interrupt_script;
    /// Called when that has changed nothing for so long either.
    std::chrono::milliseconds exit_after;
    std::function<void()> exit_process;
  };

  StuckExit(std::shared_ptr<FaultBoard> faults, Options options);

  /// The fault is that this rank is stuck.
  bool is_stuck() const;
  /// Interrupts or ends the process when it is time. What a stuck rank does in
  /// the end is progress, too.
  /// @param status  of now
  void look(const LivenessFrame& status);

 private:
  using Clock = std::chrono::steady_clock;

  const std::shared_ptr<FaultBoard> faults_;
  const Options options_;
  std::optional<LivenessFrame> status_;  // from when it was found to be stuck
  Clock::time_point since_;
  bool is_interrupted_ = false;
};

}  // namespace smp::health
