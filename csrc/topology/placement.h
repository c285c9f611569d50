#pragma once

#include <array>
#include <string>

namespace smp::topology {

/// The three independent axes of the process grid.
enum class Axis { kPp = 0, kTp = 1, kRdp = 2 };

inline constexpr int kNumAxes = 3;

/// Axes from slowest to fastest over neighbouring global ranks.
using AxisOrder = std::array<Axis, kNumAxes>;

/// Reads "cluster" (= "DPT"), "spread" (= "TPD") or a permutation of the
/// letters D (rdp), P (pp), T (tp); the right-most letter varies fastest.
/// @throws ValueError for anything else
AxisOrder parse_placement(const std::string& strategy);

/// Returns the three letters of an order, for instance "DPT".
std::string placement_letters(const AxisOrder& order);

}  // namespace smp::topology
