#pragma once

#include <vector>

namespace smp::partition {

/// Cuts a sequence into contiguous, non-empty segments such that the largest
/// segment cost is minimal and, among those cuts, the sum of squares is.
/// Deterministic; O(num_segments * costs.size()^2).
/// @param costs  none negative
/// @param num_segments  in [1, costs.size()]
/// @return the end (exclusive) of each segment; the last is `costs.size()`
std::vector<int> split_segments(const std::vector<double>& costs,
                                int num_segments);

}  // namespace smp::partition
