#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "csrc/health/fault_board.h"

namespace smp::health {

/// Finds a boundary at which all ranks can stop after any rank was asked to;
/// this is one rank's part. Ranks pass boundaries (calls of `arrive`) in one
/// order but at different times, so the rank that asks may be behind the
/// others.
///
/// The hub freezes all ranks: each sends the first boundary it has not passed
/// yet, and waits there. They stop at the highest of these, and ranks before it
/// go on to it. Until a rank asks, a boundary costs one lock. Thread-safe.
class StopAgreement {
 public:
  explicit StopAgreement(std::shared_ptr<FaultBoard> faults);
  ~StopAgreement();
  StopAgreement(const StopAgreement&) = delete;
  StopAgreement& operator=(const StopAgreement&) = delete;

  /// Makes `arrive` wait for `decide` from now on.
  /// @return number of the next boundary, counted from 1
  int64_t freeze();

  /// Sets the boundary at which all ranks stop. The first decision counts.
  void decide(int64_t boundary);

  /// Passes a boundary.
  /// @return true when this is the agreed boundary or a later one
  /// @throws PeerFailure on a fault; Error at the time-out
  bool arrive(std::chrono::milliseconds timeout);

  /// Returns whether a rank has asked to stop, as far as this rank was told.
  bool is_asked() const;

 private:
  const std::shared_ptr<FaultBoard> faults_;
  int fault_subscription_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t num_arrived_ = 0;
  bool frozen_ = false;
  std::optional<int64_t> boundary_;
};

}  // namespace smp::health
