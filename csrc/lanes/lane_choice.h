#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/lanes/descriptor.h"

namespace smp::lanes {

/// The facts by which a rank's lane is chosen. `mode` and `slot_bytes` are
/// equal on all ranks.
struct LaneFacts {
  std::string mode = "auto";  ///< SMP_LANE: auto, ipc, nccl or host
  std::string machine = {};   ///< equal on ranks of one host
  int pipeline = 0;           ///< equal on ranks that exchange tensors
  std::string device = {};    ///< device of the rank; equal in all processes
  std::vector<std::string> reachable = {};  ///< devices that it can read
  std::string why_not = {};      ///< why it cannot share memory; empty: it can
  std::string why_no_nccl = {};  ///< why it cannot use NCCL; empty: it can
  /// Host of the rank in the view of NCCL, if it is not `machine`.
  std::string nccl_host = {};
  int64_t slot_bytes = 0;
};

/// The lane of a pair of ranks.
struct LaneChoice {
  std::optional<LaneKind> kind = {};  ///< none: they send no tensors
  std::string reason = {};            ///< for people
};
/// The choices by sending rank, then by receiving rank.
using LaneChoices = std::vector<std::vector<LaneChoice>>;

/// Returns why a rank cannot use NCCL with this value of CUDA_LAUNCH_BLOCKING;
/// empty: it can, also where the variable is not set.
std::string why_no_nccl_with(const std::string& launch_blocking);

/// Returns "host", "fake", "ipc" or "nccl".
const char* name_of(LaneKind kind);

/// Chooses lanes for ranks of one pipeline; the answer is the same on all
/// ranks. Two ranks of one host whose devices can read each other use memory
/// that both map. Other pairs use NCCL, if both have it and devices of their
/// own, or else the host.
/// @throws ValueError when ranks differ in facts that must be equal, or when
///         SMP_LANE demands a lane that some pair cannot have
LaneChoices choose_lanes(const std::vector<LaneFacts>& facts_by_rank);

/// Returns the next choice for a pair in which a rank has found that it cannot
/// have `kind`, for this reason.
/// @throws ValueError when SMP_LANE demands `kind`
LaneChoice choose_after(LaneKind kind, int a, int b,
                        const std::vector<LaneFacts>& facts_by_rank,
                        const std::string& reason);

}  // namespace smp::lanes
