#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/lanes/lane_choice.h"

namespace smp::lanes {

class IpcLane;
class NcclLane;

/// Sends a byte string to all ranks; returns those of all, by global rank.
using LaneExchange =
    std::function<std::vector<std::string>(const std::string& own)>;

/// The lanes of a rank that can be opened; null where its facts have a reason.
struct OpenableLanes {
  IpcLane* ipc = nullptr;
  NcclLane* nccl = nullptr;
};

/// Chooses lanes and opens them. Collective: one to five exchanges. A pair that
/// cannot open each other's memory tries NCCL, and a pair that cannot use NCCL
/// uses the host.
/// @throws ValueError as `choose_lanes`, and when SMP_LANE demands a lane that
///         cannot be opened; on all ranks
LaneChoices agree_on_lanes(const LaneFacts& own, int global_rank,
                           OpenableLanes lanes, const LaneExchange& exchange);

}  // namespace smp::lanes
