#pragma once

#include "csrc/health/fault_board.h"
#include "csrc/health/liveness_frame.h"

namespace smp::health {

/// Puts what the hub says of other ranks on the board.
/// @return whether that is what the frame is about
/// @throws Error for a frame without what it is about
bool put_on_board(FaultBoard& board, LivenessFrame& frame);

}  // namespace smp::health
