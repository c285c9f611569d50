#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/lanes/lane_choice.h"

namespace smp::lanes {

class IpcLane;
class NcclLane;

/// A byte string of this rank to all; those of all ranks, by global rank.
using LaneExchange =
    std::function<std::vector<std::string>(const std::string& own)>;

/// Those of a rank that can be opened; null where its facts say why not.
struct OpenableLanes {
  IpcLane* ipc = nullptr;
  NcclLane* nccl = nullptr;
};

/// Chooses, and opens what was chosen. Collective: one to five exchanges. A
/// pair that cannot open the memory of each other tries NCCL, and one that
/// cannot use NCCL goes through the host.
/// @throws ValueError as `choose_lanes`, and when SMP_LANE demands what cannot
///     be opened; on all ranks
LaneChoices agree_on_lanes(const LaneFacts& own, int global_rank,
                           OpenableLanes lanes, const LaneExchange& exchange);

}  // namespace smp::lanes
