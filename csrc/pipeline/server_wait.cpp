// How the server waits, what ends a wait early, and what it says of it.

#include <algorithm>
#include <optional>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/log.h"
#include "csrc/health/fault_aware_wait.h"
#include "csrc/pipeline/server.h"

namespace smp::pipeline {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{200};

// Afterwards nothing of the pipeline is going on.
struct ActivityEnd {
  explicit ActivityEnd(health::WaitRegistry& registry) : registry(registry) {}
  ~ActivityEnd() { registry.set_activity({}); }
  health::WaitRegistry& registry;
};

}  // namespace

// Waits on `changed_` until `done`, a fault, the departure of a rank of this
// replica, Ctrl-C, or `timeout` without any progress.
void Server::wait_until(std::unique_lock<std::mutex>& lock,
                        const std::function<bool()>& done) {
  auto last_progress = Clock::now();
  int64_t progress = -1;
  std::optional<Clock::time_point> left_since;
  health::BlockedScope blocked(faults_->waits());
  const ActivityEnd activity_end(faults_->waits());
  while (!done()) {
    changed_.wait_for(lock, kPoll);
    if (done()) return;
    lock.unlock();
    faults_->check_interrupt();
    // This rank's own failure arrives with its context, as the real exception.
    if (const auto fault = faults_->fault();
        fault && fault->global_rank != options_.global_rank) {
      faults_->raise_if_faulted();
    }
    const auto now = Clock::now();
    const int64_t seen = mailbox_->progress() + scheduler_.stats().num_switches;
    const bool waits = scheduler_.baton_is_free();
    if (seen != progress || !waits) last_progress = now;
    progress = seen;
    if (waits && now - last_progress >= std::max<Clock::duration>(
                                            options_.hold_back_timeout,
                                            20 * scheduler_.longest_turn())) {
      run_held_back();
    }
    const std::string what = describe_wait();
    blocked.update(waits && now - last_progress >= kPoll, what);
    faults_->waits().set_activity(what);
    for (const int rank : ranks_needed()) {
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

// A schedule that waits for what does not come costs time, and not the step.
void Server::run_held_back() {
  const std::string what = scheduler_.run_held_back();
  if (what.empty()) return;
  SMP_LOG(kWarning,
          "the pipeline schedule waited for a task that did not "
          "come, so this rank went on with ",
          what,
          "; the schedule does not "
          "fit the calls that the model makes");
}

// Without whom the wait cannot end. Others may have left: they are done.
std::vector<int> Server::ranks_needed() const {
  std::vector<int> ranks = scheduler_.awaited_ranks();
  if (!is_driver() && !step_end_seen_) ranks.push_back(driver_rank());
  if (is_driver() && in_step_ && scheduler_.is_idle()) {
    for (const int rank : options_.pp_ranks) {
      if (rank != options_.global_rank) ranks.push_back(rank);
    }
  }
  return ranks;
}

std::string Server::describe_wait() const {
  std::string text = "step call " + std::to_string(step_) + ": ";
  const std::string queued = queues_.describe();
  if (!queued.empty()) text += queued + "; ";
  if (!scheduler_.is_idle()) return text + scheduler_.describe();
  if (is_driver()) return text + "waiting for the bodies of other ranks";
  return text + "waiting for global_rank " + std::to_string(driver_rank()) +
         (in_step_ ? " to end it" : " to begin it");
}

void Server::on_fault() {
  const auto fault = faults_->fault();
  if (!fault || fault->global_rank == options_.global_rank) return;
  scheduler_.cancel(
      std::make_exception_ptr(PeerFailure(rank_prefix() + fault->describe())));
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void Server::on_context_error(const Context& context,
                              const std::exception_ptr& error) {
  if (!error_reporter_) return;
  try {
    std::rethrow_exception(error);
  } catch (const PeerFailure&) {
    // Somebody else's failure; it has been told already.
  } catch (const std::exception& e) {
    error_reporter_(context.where, e.what());
  }
}

std::string Server::module_name(int64_t module_id) const {
  if (module_id == kOperationId) return "(arithmetic)";
  if (module_id == kFunctionId) return "(function)";
  const auto i = static_cast<size_t>(module_id);
  if (i >= module_names_.size()) return std::to_string(module_id);
  return module_names_[i].empty() ? "(root)" : module_names_[i];
}

std::string Server::describe_task(Phase phase, int64_t mb,
                                  int64_t module_id) const {
  return "module '" + module_name(module_id) + "', microbatch " +
         std::to_string(mb) +
         (phase == Phase::kForward    ? ", forward"
          : phase == Phase::kBackward ? ", backward"
                                      : ", weight gradients");
}

}  // namespace smp::pipeline
