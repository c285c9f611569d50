#include "csrc/partition/tree_partitioner.h"

#include <vector>

#include "csrc/common/check.h"
#include "csrc/partition/decision_tree.h"
#include "csrc/partition/refinement.h"
#include "csrc/partition/tree_split.h"

namespace smp::partition {

Assignment solve(const ModuleTree& tree, const PartitionOptions& options) {
  SMP_CHECK_VALUE(tree.num_nodes() > 0, "partition: the module tree is empty");
  SMP_CHECK_VALUE(options.num_partitions >= 1,
                  "partition: expected at least 1 partition, got ",
                  options.num_partitions);
  SMP_CHECK_VALUE(options.memory_weight >= 0 && options.memory_weight <= 1,
                  "partition: memory_weight must be in [0, 1], got ",
                  options.memory_weight);
  if (options.num_partitions == 1) {
    return make_assignment(tree, 1, std::vector<int>(tree.num_nodes(), 0));
  }
  const DecisionTree decisions(tree, options.memory_weight);
  const int num_leaves = decisions.num_leaves();
  SMP_CHECK_VALUE(
      options.num_partitions <= num_leaves, "partition: the model cannot be ",
      "split into ", options.num_partitions, " partitions, because it has ",
      num_leaves,
      " modules with parameters that can be placed apart (modules that share "
      "a parameter count as one); set pipeline_parallel_degree to at most ",
      num_leaves > 0 ? num_leaves : 1,
      " or divide the model into more submodules");
  const TreeSplit split = split_tree(decisions, options.num_partitions);
  return make_assignment(tree, options.num_partitions,
                         refine(decisions, split, options.num_partitions));
}

}  // namespace smp::partition
