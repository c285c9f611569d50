#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/lanes/descriptor.h"

namespace smp::lanes {

/// What decides which lane a rank can use. Same on all ranks: `mode`,
/// `slot_bytes`.
struct LaneFacts {
  std::string mode = "auto";  ///< SMP_LANE: auto, ipc, nccl or host
  std::string machine = {};   ///< equal on ranks of one host
  int pipeline = 0;         ///< equal on ranks that send tensors to each other
  std::string device = {};  ///< of the rank; equal in all processes
  std::vector<std::string> reachable = {};  ///< devices that it can read
  std::string why_not = {};      ///< it can share no memory, for this reason
  std::string why_no_nccl = {};  ///< likewise it cannot use NCCL
  /// What NCCL takes for the host of the rank, where that is not `machine`.
  std::string nccl_host = {};
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
/// memory that both map. Else over NCCL, if both have it and devices of their
/// own. Else through the host. The same answer on all ranks.
/// @throws ValueError when ranks differ in what must be the same, or when
///     SMP_LANE demands what some pair cannot have
LaneChoices choose_lanes(const std::vector<LaneFacts>& facts_by_rank);

/// What comes next for a pair that cannot have `kind`, for this reason, which
/// one of them has found out.
/// @throws ValueError when SMP_LANE demands `kind`
LaneChoice choose_after(LaneKind kind, int a, int b,
                        const std::vector<LaneFacts>& facts_by_rank,
                        const std::string& reason);

}  // namespace smp::lanes
