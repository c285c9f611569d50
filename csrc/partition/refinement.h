#pragma once

#include <vector>

#include "csrc/partition/decision_tree.h"
#include "csrc/partition/tree_split.h"

namespace smp::partition {

/// Improves a tree split, whose weak case is a heavy module beside a list of
/// layers: there the cut is decided above the level where layers can be cut.
///
/// The smallest nodes at which the split cut, and the layers of lists beside
/// them, become the units of one chain, which is cut optimally. The result is
/// taken when the largest load falls by more than 2 %, or when a partition had
/// nothing. Then units are opened level by level, each time for a gain of more
/// than 10 %; layers of lists (transformer blocks) only if they are heavier
/// than the mean load, so that whole layers cannot be balanced.
/// @return a partition per node, completed by DecisionTree::complete
std::vector<int> refine(const DecisionTree& tree, const TreeSplit& split,
                        int num_partitions);

}  // namespace smp::partition
