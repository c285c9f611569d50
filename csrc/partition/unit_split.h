#pragma once

#include <optional>
#include <vector>

#include "csrc/partition/objective.h"

namespace smp::partition {

/// Cuts the chain of units into stages.
///
/// Candidates are, for each depth of the tree, the best cut of the chain
/// between modules of that depth; the boundaries of each are then moved as long
/// as that helps. The shallowest candidate within `kTolerance` of the best is
/// taken.
///
/// A cut through a layer of a list (a transformer block), or through a module
/// in it, whose own code reads data makes these data pass through the driver.
/// It is taken only if the largest load falls by more than 10 %. Work that the
/// code leaves to the rank that has the data (`Value::source_values`) does not
/// count. If the tree has no values, every cut through a layer counts as such,
/// and one layer must also be heavier than the mean load.
/// @return stage per unit; nothing if the memory limit allows none
std::optional<std::vector<int>> split_units(const Objective& objective);

/// Tolerance below the promised 2 %, since the cut is not exact for values
/// which are read far away.
inline constexpr double kTolerance = 0.015;

}  // namespace smp::partition
