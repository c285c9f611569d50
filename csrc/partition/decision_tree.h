#pragma once

#include <vector>

#include "csrc/partition/module_tree.h"

namespace smp::partition {

/// A ModuleTree with the rules about modules that have no choice worked in:
/// what is tied goes with the first of its tie group, what is below an
/// indivisible node goes with that node, and what holds no state goes with its
/// parent. Costs of such nodes are counted where they go.
class DecisionTree {
 public:
  /// @param memory_weight  weight of memory against compute, in [0, 1]; a term
  ///     whose total is zero is left out
  DecisionTree(const ModuleTree& tree, double memory_weight);

  int num_nodes() const { return static_cast<int>(home_.size()); }
  /// The node whose partition `idx` takes; often `idx` itself.
  int home(int idx) const { return home_[idx]; }
  /// Own cost, with that of all nodes which have their home here.
  double own_cost(int idx) const { return own_cost_[idx]; }
  double subtree_cost(int idx) const { return subtree_cost_[idx]; }
  double total_cost() const { return subtree_cost_[0]; }
  /// Children below which there is something to decide, in order.
  const std::vector<int>& children(int idx) const { return children_[idx]; }
  /// A list of layers. Cutting between its children costs nothing extra.
  bool is_list(int idx) const { return is_list_[idx]; }
  /// One of several layers of a list, which is better not cut.
  bool is_layer(int idx) const { return is_layer_[idx]; }
  /// Nodes without such children: the most partitions that can be filled.
  int num_leaves() const;

  /// Spreads the partitions of home nodes to all nodes.
  std::vector<int> complete(std::vector<int> partition_idxs) const;
  /// Cost on each partition.
  std::vector<double> loads(const std::vector<int>& partition_idxs,
                            int num_partitions) const;
  /// Whether a partition holds no home node with state.
  bool leaves_idle(const std::vector<int>& partition_idxs,
                   int num_partitions) const;

 private:
  void find_homes(const ModuleTree& tree);
  void find_layers(const ModuleTree& tree);
  void sum_costs(const ModuleTree& tree, double memory_weight);

  std::vector<int> home_;
  std::vector<bool> has_state_;  // of homes: with all that lives there
  std::vector<bool> decides_;    // a home with state is in the subtree
  std::vector<double> own_cost_;
  std::vector<double> subtree_cost_;
  std::vector<std::vector<int>> children_;
  std::vector<bool> is_list_;
  std::vector<bool> is_layer_;
};

}  // namespace smp::partition
