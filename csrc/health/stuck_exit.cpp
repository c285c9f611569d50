#include "csrc/health/stuck_exit.h"

#include <algorithm>
#include <utility>

#include "csrc/common/log.h"

namespace smp::health {
namespace {

constexpr std::chrono::milliseconds kBeforeInterrupt{1000};

}  // namespace

StuckExit::StuckExit(std::shared_ptr<FaultBoard> faults, Options options)
    : faults_(std::move(faults)), options_(std::move(options)) {}

bool StuckExit::is_stuck() const {
  const std::optional<Fault> fault = faults_->fault();
  return fault && std::count(fault->stuck.begin(), fault->stuck.end(),
                             faults_->global_rank()) > 0;
}

void StuckExit::check(const LivenessFrame& status) {
  if (!is_stuck()) return;
  const Clock::time_point now = Clock::now();
  if (!status_ || status.progress != status_->progress ||
      status.is_blocked != status_->is_blocked) {
    status_ = status;
    since_ = now;
  } else if (now - since_ >= options_.exit_after) {
    log_line(LogLevel::kError,
             "this rank ends without its script, which "
             "does not come back: " +
                 faults_->fault()->headline());
    options_.exit_process();
  } else if (now - since_ >= kBeforeInterrupt && !is_interrupted_) {
    is_interrupted_ = true;
    options_.interrupt_script();
  }
}

}  // namespace smp::health
