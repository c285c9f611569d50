#include "csrc/pipeline/step_wait.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/log.h"
#include "csrc/health/fault_aware_wait.h"

namespace smp::pipeline {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{200};

// Clears the activity on leaving: nothing of the pipeline is going on then.
struct ActivityEnd {
  explicit ActivityEnd(health::WaitRegistry& registry) : registry(registry) {}
  ~ActivityEnd() { registry.set_activity({}); }
  health::WaitRegistry& registry;
};

}  // namespace

StepWait::StepWait(const ServerOptions& options,
                   std::shared_ptr<mailbox::Mailbox> mailbox,
                   std::shared_ptr<health::FaultBoard> faults,
                   Scheduler& scheduler)
    : options_(options),
      mailbox_(std::move(mailbox)),
      faults_(std::move(faults)),
      scheduler_(scheduler) {}

void StepWait::until(std::unique_lock<std::mutex>& lock,
                     std::condition_variable& changed,
                     const Callbacks& callbacks) {
  auto last_progress = SteadyClock::now();
  int64_t progress = -1;
  int64_t due_turns = -1;  // when this rank last waited
  std::optional<SteadyClock::time_point> left_since;
  health::BlockedScope blocked(faults_->waits());
  const ActivityEnd activity_end(faults_->waits());
  while (!callbacks.is_over()) {
    changed.wait_for(lock, kPoll);
    if (callbacks.is_over()) return;
    lock.unlock();
    faults_->check_interrupt();
    // A failure of this rank arrives with its context, as the real exception.
    if (const auto fault = faults_->fault();
        fault && !fault->is_raised_by(options_.global_rank)) {
      faults_->raise_if_faulted();
    }
    const auto now = SteadyClock::now();
    const bool waits = scheduler_.baton_is_free();
    const int64_t seen = mailbox_->progress() +
                         scheduler_.stats().num_switches +
                         (waits ? device_progress() : 0);
    if (seen != progress || !waits) last_progress = now;
    progress = seen;
    if (waits && now - last_progress >= std::max<SteadyClock::duration>(
                                            options_.hold_back_timeout,
                                            20 * scheduler_.longest_turn())) {
      run_held_back();
    }
    const std::string what = callbacks.describe();
    const bool is_blocked = waits && now - last_progress >= kPoll;
    const int64_t now_due = scheduler_.num_due_turns();
    blocked.update(is_blocked, what, /*goes_on=*/now_due == due_turns);
    if (is_blocked) due_turns = now_due;
    faults_->waits().set_activity(what);
    for (const int rank : callbacks.ranks_needed()) {
      if (!faults_->has_left(rank)) continue;
      if (!left_since || !waits) left_since = now;
      if (now - *left_since >= health::FaultAwareWait::kLeftGrace) {
        health::fail_because_left(*faults_, rank, what);
      }
    }
    SMP_CHECK(
        now - last_progress < options_.timeout, "no progress for ",
        std::chrono::duration_cast<std::chrono::seconds>(now - last_progress)
            .count(),
        " s in ", what);
    lock.lock();
  }
}

// Returns the progress of this rank's device, for whose results other ranks may
// wait.
int64_t StepWait::device_progress() const {
  return options_.device_meter ? options_.device_meter->read() : 0;
}

// Runs a task that is held back. A schedule that waits for a task that never
// comes costs time, but not the step.
void StepWait::run_held_back() {
  const std::string what = scheduler_.run_held_back();
  if (what.empty()) return;
  SMP_LOG(kWarning,
          "the pipeline schedule waited for a task that did not "
          "come, so this rank went on with ",
          what,
          "; the schedule does not "
          "fit the calls that the model makes");
}

}  // namespace smp::pipeline
