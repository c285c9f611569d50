#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "csrc/lanes/descriptor.h"

namespace smp::lanes {

class IpcLane;

/// What decides which lane a rank can use. Same on all ranks: `mode`,
/// `slot_bytes`.
struct LaneFacts {
  std::string mode = "auto";  ///< SMP_LANE: auto, ipc or host
  std::string machine = {};   ///< equal on ranks of one host
  int pipeline = 0;         ///< equal on ranks that send tensors to each other
  std::string device = {};  ///< of the rank; equal in all processes
  std::vector<std::string> reachable = {};  ///< devices that it can read
  std::string why_not = {};  ///< it can share no memory, for this reason
  int64_t slot_bytes = 0;
};

/// Of a pair of ranks.
struct LaneChoice {
  std::optional<LaneKind> kind = {};  ///< none: they send no tensors
  std::string reason = {};            ///< for people
};
/// By the rank that sends, then by the one that receives.
using LaneChoices = std::vector<std::vector<LaneChoice>>;

/// "host", "fake", "ipc" or "nccl".
const char* name_of(LaneKind kind);

/// For ranks of one pipeline. One host, and both devices can read each other:
/// memory that both map. Else through the host. The same answer on all ranks.
/// @throws ValueError when ranks differ in what must be the same, or when
///     SMP_LANE demands what some pair cannot have
LaneChoices choose_lanes(const std::vector<LaneFacts>& facts_by_rank);

/// A byte string of this rank to all; those of all ranks, by global rank.
using LaneExchange =
    std::function<std::vector<std::string>(const std::string& own)>;

/// Chooses, and opens what was chosen. Collective: one to three exchanges. A
/// pair that cannot open the memory of each other goes through the host.
/// @param lane  of this rank; null where `own.why_not` says why
/// @throws ValueError as `choose_lanes`, and when SMP_LANE=ipc and memory
///     cannot be opened; on all ranks
LaneChoices agree_on_lanes(const LaneFacts& own, int global_rank, IpcLane* lane,
                           const LaneExchange& exchange);

}  // namespace smp::lanes
