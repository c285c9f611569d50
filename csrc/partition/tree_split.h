#pragma once

#include <vector>

#include "csrc/partition/objective.h"

namespace smp::partition {

/// Walks the tree from the root and cuts each node's stages among its children
/// in proportion to their costs.
/// @return stage per unit; some stages may get nothing
std::vector<int> split_tree(const Objective& objective);

}  // namespace smp::partition
