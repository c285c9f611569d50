#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/health/fault_board.h"
#include "csrc/mailbox/mailbox.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/server_options.h"

namespace smp::pipeline {

/// Waits in the user's thread for a step, ends the wait early after a failure,
/// and describes the wait for people.
class StepWait {
 public:
  struct Callbacks {
    std::function<bool()> is_over;  ///< asked under the lock; the others not
    std::function<std::vector<int>()> ranks_needed;  ///< to end the wait
    std::function<std::string()> describe;
  };

  StepWait(const ServerOptions& options,
           std::shared_ptr<mailbox::Mailbox> mailbox,
           std::shared_ptr<health::FaultBoard> faults, Scheduler& scheduler);

  /// Waits on `changed` until `is_over` returns true.
  /// @throws whatever ends it early: a fault or the departure of a rank of this
  ///     replica, Ctrl-C, `timeout` without any progress
  void until(std::unique_lock<std::mutex>& lock,
             std::condition_variable& changed, const Callbacks& callbacks);

 private:
  void run_held_back();
  int64_t device_progress() const;

  const ServerOptions& options_;
  const std::shared_ptr<mailbox::Mailbox> mailbox_;
  const std::shared_ptr<health::FaultBoard> faults_;
  Scheduler& scheduler_;
};

}  // namespace smp::pipeline
