#include "csrc/health/stop_agreement.h"

#include <utility>

#include "csrc/health/fault_aware_wait.h"

namespace smp::health {

StopAgreement::StopAgreement(std::shared_ptr<FaultBoard> faults)
    : faults_(std::move(faults)) {
  fault_subscription_ = faults_->subscribe([this] {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  });
}

StopAgreement::~StopAgreement() { faults_->unsubscribe(fault_subscription_); }

int64_t StopAgreement::freeze() {
  std::lock_guard lock(mutex_);
  frozen_ = true;
  return num_arrived_ + 1;
}

void StopAgreement::decide(int64_t boundary) {
  std::lock_guard lock(mutex_);
  if (!boundary_) boundary_ = boundary;
  changed_.notify_all();
}

bool StopAgreement::arrive(std::chrono::milliseconds timeout) {
  {
    std::lock_guard lock(mutex_);
    ++num_arrived_;
    if (!frozen_) return false;
    if (boundary_) return num_arrived_ >= *boundary_;
  }
  FaultAwareWait wait(*faults_,
                      {.what = "the agreement of all ranks on where to stop",
                       .timeout = timeout});
  std::unique_lock lock(mutex_);
  wait.until(lock, changed_, [this] { return boundary_.has_value(); });
  return num_arrived_ >= *boundary_;
}

bool StopAgreement::is_asked() const {
  std::lock_guard lock(mutex_);
  return frozen_;
}

}  // namespace smp::health
