#include "csrc/topology/process_grid.h"

#include <algorithm>

#include "csrc/common/check.h"

namespace smp::topology {

namespace {

constexpr const char* kGroupKindNames[kNumGroupKinds] = {
    "world", "mp", "dp", "pp", "tp", "rdp", "cp", "dp_cp", "rdp_cp", "tp_cp"};

/// Returns whether members of one group may differ along `axis`.
bool varies(GroupKind kind, Axis axis) {
  switch (kind) {
    case GroupKind::kWorld:
      return true;
    case GroupKind::kMp:
      return axis == Axis::kPp || axis == Axis::kTp;
    case GroupKind::kDp:
      return axis == Axis::kTp || axis == Axis::kRdp;
    case GroupKind::kPp:
      return axis == Axis::kPp;
    case GroupKind::kTp:
      return axis == Axis::kTp;
    case GroupKind::kRdp:
      return axis == Axis::kRdp;
    case GroupKind::kCp:
      return axis == Axis::kCp;
    case GroupKind::kDpCp:
      return axis != Axis::kPp;
    case GroupKind::kRdpCp:
      return axis == Axis::kRdp || axis == Axis::kCp;
    case GroupKind::kTpCp:
      return axis == Axis::kTp || axis == Axis::kCp;
  }
  SMP_ASSERT(false, "group kind ", static_cast<int>(kind));
  return false;
}

}  // namespace

GroupKind parse_group_kind(const std::string& name) {
  const auto* found =
      std::find(std::begin(kGroupKindNames), std::end(kGroupKindNames), name);
  SMP_CHECK_VALUE(
      found != std::end(kGroupKindNames), "group kind is '", name,
      "', expected world, mp, dp, pp, tp, rdp, cp, dp_cp, rdp_cp or "
      "tp_cp");
  return static_cast<GroupKind>(found - std::begin(kGroupKindNames));
}

ProcessGrid::ProcessGrid(int world_size, int pp_size, int tp_size, int cp_size,
                         const std::string& placement_strategy)
    : world_size_(world_size), order_(parse_placement(placement_strategy)) {
  SMP_CHECK_VALUE(
      world_size >= 1 && pp_size >= 1 && tp_size >= 1 && cp_size >= 1,
      "sizes must be at least 1, got world ", world_size, ", pp ", pp_size,
      ", tp ", tp_size, ", cp ", cp_size);
  const int per_replica = pp_size * tp_size * cp_size;
  SMP_CHECK_VALUE(world_size % per_replica == 0, "world size ", world_size,
                  " is not a multiple of pp * tp * cp = ", pp_size, " * ",
                  tp_size, " * ", cp_size, "; start a multiple of ",
                  per_replica, " processes or lower a degree");
  sizes_ = {pp_size, tp_size, world_size / per_replica, cp_size};
}

std::string ProcessGrid::placement() const {
  std::string letters = placement_letters(order_);
  if (axis_size(Axis::kCp) == 1) letters.erase(letters.find('C'), 1);
  return letters;
}

int ProcessGrid::axis_size(Axis axis) const {
  return sizes_[static_cast<int>(axis)];
}

void ProcessGrid::check_rank(int global_rank) const {
  SMP_CHECK_VALUE(global_rank >= 0 && global_rank < world_size_, "global rank ",
                  global_rank, " is outside [0, ", world_size_, ")");
}

Coordinates ProcessGrid::coordinates(int global_rank) const {
  check_rank(global_rank);
  std::array<int, kNumAxes> index{};
  int rest = global_rank;
  for (auto axis = order_.rbegin(); axis != order_.rend(); ++axis) {
    index[static_cast<int>(*axis)] = rest % axis_size(*axis);
    rest /= axis_size(*axis);
  }
  return {index[0], index[1], index[2], index[3]};
}

int ProcessGrid::global_rank(const Coordinates& coordinates) const {
  const std::array<int, kNumAxes> index = {coordinates.pp, coordinates.tp,
                                           coordinates.rdp, coordinates.cp};
  int rank = 0;
  for (const Axis axis : order_) {
    const int i = index[static_cast<int>(axis)];
    SMP_CHECK_VALUE(i >= 0 && i < axis_size(axis), "coordinates pp ",
                    coordinates.pp, " tp ", coordinates.tp, " rdp ",
                    coordinates.rdp, " cp ", coordinates.cp,
                    " are outside the grid pp ", sizes_[0], " tp ", sizes_[1],
                    " rdp ", sizes_[2], " cp ", sizes_[3]);
    rank = rank * axis_size(axis) + i;
  }
  return rank;
}

std::vector<int> ProcessGrid::group(GroupKind kind, int global_rank) const {
  const Coordinates own = coordinates(global_rank);
  std::vector<int> members;
  members.reserve(group_size(kind));
  for (int rank = 0; rank < world_size_; ++rank) {
    const Coordinates other = coordinates(rank);
    if ((varies(kind, Axis::kPp) || other.pp == own.pp) &&
        (varies(kind, Axis::kTp) || other.tp == own.tp) &&
        (varies(kind, Axis::kRdp) || other.rdp == own.rdp) &&
        (varies(kind, Axis::kCp) || other.cp == own.cp)) {
      members.push_back(rank);
    }
  }
  return members;
}

std::vector<std::vector<int>> ProcessGrid::groups(GroupKind kind) const {
  std::vector<std::vector<int>> result;
  std::vector<bool> placed(world_size_, false);
  for (int rank = 0; rank < world_size_; ++rank) {
    if (placed[rank]) continue;
    result.push_back(group(kind, rank));
    for (const int member : result.back()) placed[member] = true;
  }
  return result;
}

int ProcessGrid::group_size(GroupKind kind) const {
  int size = 1;
  for (const Axis axis : {Axis::kPp, Axis::kTp, Axis::kRdp, Axis::kCp}) {
    if (varies(kind, axis)) size *= axis_size(axis);
  }
  return size;
}

int ProcessGrid::group_rank(GroupKind kind, int global_rank) const {
  const std::vector<int> members = group(kind, global_rank);
  const auto own =
      std::lower_bound(members.begin(), members.end(), global_rank);
  return static_cast<int>(own - members.begin());
}

std::string ProcessGrid::describe(int global_rank) const {
  const Coordinates c = coordinates(global_rank);
  const std::string cp =
      axis_size(Axis::kCp) > 1 ? detail::concat(" cp ", c.cp) : "";
  return detail::concat("pp ", c.pp, " tp ", c.tp, cp, " rdp ", c.rdp);
}

}  // namespace smp::topology
