#include "csrc/health/stop_round.h"

#include <algorithm>

namespace smp::health {

void StopRound::on_frozen(int global_rank, int64_t boundary) {
  if (members_.is_there(global_rank)) frozen_[global_rank] = boundary;
}

std::optional<LivenessFrame> StopRound::due() {
  if (!is_asked_ || is_decided_ || !members_.is_complete()) return std::nullopt;
  LivenessFrame frame;
  if (!is_freezing_) {
    is_freezing_ = true;
    frame.type = LivenessFrame::Type::kFreeze;
    return frame;
  }
  if (static_cast<int>(frozen_.size()) < members_.num_there()) {
    return std::nullopt;
  }
  is_decided_ = true;
  frame.type = LivenessFrame::Type::kStopAt;
  for (const auto& [rank, boundary] : frozen_) {
    frame.progress = std::max(frame.progress, boundary);
  }
  return frame;
}

}  // namespace smp::health
