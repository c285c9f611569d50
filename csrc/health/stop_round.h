#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "csrc/health/liveness_frame.h"
#include "csrc/health/membership.h"

namespace smp::health {

/// Part of the hub: freezes all ranks that are there, asks for their
/// boundaries, and sends them the highest answer (see StopAgreement). Used by
/// one thread.
class StopRound {
 public:
  explicit StopRound(const Membership& members) : members_(members) {}

  /// Notes that some rank wants to stop.
  void on_asked() { is_asked_ = true; }
  /// Notes that a rank waits at this boundary.
  void on_frozen(int global_rank, int64_t boundary);
  /// Notes that a rank has left, and waits nowhere.
  void on_left(int global_rank) { frozen_.erase(global_rank); }

  /// @return the frame to send to all ranks that are there; counts as sent
  std::optional<LivenessFrame> due();

 private:
  const Membership& members_;
  bool is_asked_ = false;
  bool is_freezing_ = false;
  bool is_decided_ = false;
  std::map<int, int64_t> frozen_;
};

}  // namespace smp::health
