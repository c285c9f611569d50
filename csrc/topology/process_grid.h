#pragma once

#include <array>
#include <string>
#include <vector>

#include "csrc/topology/placement.h"

namespace smp::topology {

/// The kinds of groups that every rank belongs to.
enum class GroupKind {
  kWorld = 0,  ///< all ranks
  kMp,         ///< one whole copy of the model: same rdp and cp
  kDp,         ///< batches of one partition: same pp and cp
  kPp,         ///< the consecutive partitions: same tp, rdp and cp
  kTp,         ///< ranks that split single modules: same pp, rdp and cp
  kRdp,        ///< batches of one slice of one partition: same pp, tp and cp
  kCp,         ///< ranks that split sequences of one batch: same pp, tp and rdp
  kDpCp,       ///< replicas of one partition's parameters: same pp
  kRdpCp,      ///< replicas of one slice of a partition: same pp and tp
  kTpCp,       ///< ranks that run tasks in one order: same pp and rdp
};

inline constexpr int kNumGroupKinds = 10;

/// Reads "world", "mp", "dp", "pp", "tp", "rdp", "cp", "dp_cp", "rdp_cp" or
/// "tp_cp".
/// @throws ValueError for another word
GroupKind parse_group_kind(const std::string& name);

struct Coordinates {
  int pp = 0;
  int tp = 0;
  int rdp = 0;
  int cp = 0;
};

/// The place of each global rank: `world = pp * tp * cp * rdp`. Pure and
/// immutable; the same object on every rank.
///
/// With order L1 L2 L3 L4 and sizes n(L): `global_rank =
/// ((i(L1) * n(L2) + i(L2)) * n(L3) + i(L3)) * n(L4) + i(L4)`.
///
/// Ranks of a cp group read one batch, and each computes a part of its
/// sequences. Their parameters are equal, so kinds for batches (dp, rdp)
/// exclude the cp axis, and kinds for parameters (dp_cp, rdp_cp) include it.
class ProcessGrid {
 public:
  /// @throws ValueError when `pp_size * tp_size * cp_size` does not divide
  /// `world_size`
  ProcessGrid(int world_size, int pp_size, int tp_size, int cp_size,
              const std::string& placement_strategy);

  int world_size() const { return world_size_; }
  /// Returns letters such as "DPT", names already resolved; with C where the cp
  /// axis has more than one place.
  std::string placement() const;

  Coordinates coordinates(int global_rank) const;
  int global_rank(const Coordinates& coordinates) const;

  /// Returns the members of the group of `global_rank`, ascending.
  std::vector<int> group(GroupKind kind, int global_rank) const;
  /// Returns all groups of a kind, ordered by their first member; a partition
  /// of the world.
  std::vector<std::vector<int>> groups(GroupKind kind) const;
  int group_size(GroupKind kind) const;
  /// Returns the position of `global_rank` inside its group.
  int group_rank(GroupKind kind, int global_rank) const;

  /// Returns "pp 1 tp 0 rdp 1", the words that errors use; "pp 1 tp 0 cp 0 rdp
  /// 1" where the cp axis has more than one place.
  std::string describe(int global_rank) const;

 private:
  int axis_size(Axis axis) const;
  void check_rank(int global_rank) const;

  int world_size_;
  std::array<int, kNumAxes> sizes_;  // indexed by Axis
  AxisOrder order_;
};

}  // namespace smp::topology
