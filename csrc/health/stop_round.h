#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "csrc/health/liveness_frame.h"
#include "csrc/health/membership.h"

namespace smp::health {

/// Part of the hub: freezes all ranks that are there, asks where they are, and
/// tells them the highest answer (see StopAgreement). One thread.
class StopRound {
 public:
  explicit StopRound(const Membership& members) : members_(members) {}

  /// Some rank wants to stop.
  void on_asked() { is_asked_ = true; }
  /// A rank waits at this boundary.
  void on_frozen(int global_rank, int64_t boundary);
  /// It has left, and waits nowhere.
  void on_left(int global_rank) { frozen_.erase(global_rank); }

  /// @return what all ranks that are there are to be told now; counts as told
  std::optional<LivenessFrame> due();

 private:
  const Membership& members_;
  bool is_asked_ = false;
  bool is_freezing_ = false;
  bool is_decided_ = false;
  std::map<int, int64_t> frozen_;
};

}  // namespace smp::health
