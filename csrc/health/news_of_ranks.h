#pragma once

#include "csrc/health/fault_board.h"
#include "csrc/health/liveness_frame.h"

namespace smp::health {

/// Puts the hub's news of other ranks on the board.
/// @return whether the frame is such news
/// @throws Error for a frame without the values its type needs
bool put_on_board(FaultBoard& board, LivenessFrame& frame);

}  // namespace smp::health
