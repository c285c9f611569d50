#pragma once

#include <array>
#include <string>
#include <vector>

#include "csrc/topology/placement.h"

namespace smp::topology {

/// The kinds of groups that every rank belongs to.
enum class GroupKind {
  kWorld = 0,  ///< all ranks
  kMp,         ///< one whole copy of the model: same rdp
  kDp,         ///< same partition: same pp
  kPp,         ///< the consecutive partitions: same tp and rdp
  kTp,         ///< ranks that split single modules: same pp and rdp
  kRdp,        ///< same partition and same slice: same pp and tp
};

inline constexpr int kNumGroupKinds = 6;

/// Reads "world", "mp", "dp", "pp", "tp" or "rdp".
/// @throws ValueError for another word
GroupKind parse_group_kind(const std::string& name);

struct Coordinates {
  int pp = 0;
  int tp = 0;
  int rdp = 0;
};

/// The place of each global rank: `world = pp * tp * rdp`. Pure and immutable;
/// the same object on every rank.
///
/// With order L1 L2 L3 and sizes n(L):
/// `global_rank = (i(L1) * n(L2) + i(L2)) * n(L3) + i(L3)`.
class ProcessGrid {
 public:
  /// @throws ValueError when `pp_size * tp_size` does not divide `world_size`
  ProcessGrid(int world_size, int pp_size, int tp_size,
              const std::string& placement_strategy);

  int world_size() const { return world_size_; }
  /// Returns letters such as "DPT", names already resolved.
  std::string placement() const { return placement_letters(order_); }

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

  /// Returns "pp 1 tp 0 rdp 1", the words that errors use.
  std::string describe(int global_rank) const;

 private:
  int axis_size(Axis axis) const;
  void check_rank(int global_rank) const;

  int world_size_;
  std::array<int, kNumAxes> sizes_;  // indexed by Axis
  AxisOrder order_;
};

}  // namespace smp::topology
