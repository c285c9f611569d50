#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "csrc/health/fault_board.h"

namespace smp::health {

/// One rank's part in finding a boundary at which all ranks can stop, after any
/// of them was asked to. Ranks pass boundaries (calls of `arrive`) in one order
/// but at different times, so the rank that asks may be behind the others.
///
/// The hub freezes all ranks: each tells which boundary it has not passed yet,
/// and waits there. The highest one is where they stop, and those that are not
/// there yet go on to it. Until somebody asks, a boundary costs one lock.
/// Thread-safe.
class StopAgreement {
 public:
  explicit StopAgreement(std::shared_ptr<FaultBoard> faults);
  ~StopAgreement();
  StopAgreement(const StopAgreement&) = delete;
  StopAgreement& operator=(const StopAgreement&) = delete;

  /// From now on `arrive` waits for `decide`.
  /// @return number of the next boundary, counted from 1
  int64_t freeze();

  /// All ranks stop at this boundary. The first decision counts.
  void decide(int64_t boundary);

  /// Passes a boundary.
  /// @return true when this is the agreed one, or lies behind it
  /// @throws PeerFailure on a fault; Error at the time-out
  bool arrive(std::chrono::milliseconds timeout);

  /// Somebody asked, as far as this rank knows.
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
