#pragma once

#include "csrc/partition/decision_tree.h"
#include "csrc/partition/module_tree.h"
#include "csrc/partition/options.h"

namespace smp::partition {

/// Checks that each unit can be where its nodes are requested.
/// @throws ValueError with the names, if nodes that must stay together are
///     requested on different partitions, if a node that has to be on partition
///     0 is requested elsewhere, or if there is no such partition
void check_wishes(const ModuleTree& tree, int num_partitions);

/// Returns the first node of a unit that has a wish; there is one.
int asked_node(const DecisionTree& decisions, int unit_id);

/// Reports that wishes leave a stage without modules.
/// @throws ValueError
[[noreturn]] void raise_wishes(const DecisionTree& decisions,
                               const PartitionOptions& options);

}  // namespace smp::partition
