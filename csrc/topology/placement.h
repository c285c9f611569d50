#pragma once

#include <array>
#include <string>

namespace smp::topology {

/// The four independent axes of the process grid.
enum class Axis { kPp = 0, kTp = 1, kRdp = 2, kCp = 3 };

inline constexpr int kNumAxes = 4;

/// Axes from slowest to fastest over neighbouring global ranks.
using AxisOrder = std::array<Axis, kNumAxes>;

/// Reads "cluster" (= "DPT"), "spread" (= "TPD") or a permutation of the
/// letters D (rdp), P (pp), T (tp), with or without C (cp); the right-most
/// letter varies fastest. Without C, the ranks of cp are placed beside those of
/// tp, on the side of rdp: "DPT" is "DPCT", and "TPD" is "TCPD".
/// @throws ValueError for anything else
AxisOrder parse_placement(const std::string& strategy);

/// Returns the four letters of an order, for instance "DPCT".
std::string placement_letters(const AxisOrder& order);

}  // namespace smp::topology
