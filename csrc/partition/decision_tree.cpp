#include "csrc/partition/decision_tree.h"

#include <algorithm>
#include <numeric>

namespace smp::partition {

namespace {

// The top-most indivisible node above each node, or the node itself.
std::vector<int> find_atoms(const ModuleTree& tree) {
  std::vector<int> atoms(tree.num_nodes());
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    const int parent_idx = tree.node(idx).parent_idx;
    atoms[idx] = idx;
    if (parent_idx >= 0 &&
        tree.node(atoms[parent_idx]).kind == NodeKind::kIndivisible) {
      atoms[idx] = atoms[parent_idx];
    }
  }
  return atoms;
}

// The first atom of each atom's tie group. A tie between nodes inside two
// indivisible subtrees ties the whole subtrees.
std::vector<int> find_anchors(const ModuleTree& tree) {
  std::vector<int> anchors = find_atoms(tree);
  const std::vector<int> atoms = anchors;
  std::vector<int> group(tree.num_nodes());
  std::iota(group.begin(), group.end(), 0);
  auto first = [&group](int idx) {
    while (group[idx] != idx) idx = group[idx];
    return idx;
  };
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    const int a = first(atoms[idx]);
    const int b = first(atoms[tree.first_of_tie(idx)]);
    group[std::max(a, b)] = std::min(a, b);
  }
  for (int& anchor : anchors) anchor = first(anchor);
  return anchors;
}

}  // namespace

DecisionTree::DecisionTree(const ModuleTree& tree, double memory_weight)
    : home_(tree.num_nodes()),
      has_state_(tree.num_nodes(), false),
      decides_(tree.num_nodes(), false),
      own_cost_(tree.num_nodes(), 0),
      subtree_cost_(tree.num_nodes(), 0),
      children_(tree.num_nodes()),
      is_list_(tree.num_nodes(), false),
      is_layer_(tree.num_nodes(), false) {
  find_homes(tree);
  sum_costs(tree, memory_weight);
  for (int idx = 1; idx < num_nodes(); ++idx) {
    if (decides_[idx]) children_[tree.node(idx).parent_idx].push_back(idx);
  }
  find_layers(tree);
}

void DecisionTree::find_homes(const ModuleTree& tree) {
  const std::vector<int> anchors = find_anchors(tree);
  for (int idx = 0; idx < num_nodes(); ++idx) {
    if (tree.node(idx).has_state) has_state_[anchors[idx]] = true;
  }
  for (int idx = num_nodes() - 1; idx >= 0; --idx) {
    const int parent_idx = tree.node(idx).parent_idx;
    decides_[idx] = decides_[idx] || has_state_[idx];
    if (decides_[idx] && parent_idx >= 0) decides_[parent_idx] = true;
  }
  // Anchors and parents come first, so their homes are known.
  for (int idx = 0; idx < num_nodes(); ++idx) {
    if (anchors[idx] != idx) {
      home_[idx] = home_[anchors[idx]];
    } else if (!decides_[idx] && idx > 0) {
      home_[idx] = home_[tree.node(idx).parent_idx];
    } else {
      home_[idx] = idx;
    }
  }
}

void DecisionTree::sum_costs(const ModuleTree& tree, double memory_weight) {
  double total_bytes = 0;
  double total_ms = 0;
  for (int idx = 0; idx < num_nodes(); ++idx) {
    total_bytes += static_cast<double>(tree.node(idx).param_bytes);
    total_ms += tree.node(idx).compute_ms;
  }
  double bytes_weight = total_ms > 0 ? memory_weight : 1;
  double ms_weight = total_bytes > 0 ? 1 - memory_weight : 1;
  bytes_weight = total_bytes > 0 ? bytes_weight / total_bytes : 0;
  ms_weight = total_ms > 0 ? ms_weight / total_ms : 0;
  for (int idx = 0; idx < num_nodes(); ++idx) {
    const ModuleTree::Node& node = tree.node(idx);
    own_cost_[home_[idx]] +=
        bytes_weight * static_cast<double>(node.param_bytes) +
        ms_weight * node.compute_ms;
  }
  for (int idx = num_nodes() - 1; idx >= 0; --idx) {
    subtree_cost_[idx] += own_cost_[idx];
    if (idx > 0) subtree_cost_[tree.node(idx).parent_idx] += subtree_cost_[idx];
  }
}

void DecisionTree::find_layers(const ModuleTree& tree) {
  for (int idx = 0; idx < num_nodes(); ++idx) {
    is_list_[idx] = tree.node(idx).kind == NodeKind::kList;
    if (!is_list_[idx] || children_[idx].size() < 2) continue;
    for (int child : children_[idx]) is_layer_[child] = true;
  }
}

int DecisionTree::num_leaves() const {
  int count = 0;
  for (int idx = 0; idx < num_nodes(); ++idx) {
    if (decides_[idx] && children_[idx].empty()) ++count;
  }
  return count;
}

std::vector<int> DecisionTree::complete(std::vector<int> partition_idxs) const {
  for (int idx = 0; idx < num_nodes(); ++idx) {
    partition_idxs[idx] = partition_idxs[home_[idx]];  // home_[idx] <= idx
  }
  return partition_idxs;
}

std::vector<double> DecisionTree::loads(const std::vector<int>& partition_idxs,
                                        int num_partitions) const {
  std::vector<double> loads(num_partitions, 0);
  for (int idx = 0; idx < num_nodes(); ++idx) {
    loads[partition_idxs[idx]] += own_cost_[idx];
  }
  return loads;
}

bool DecisionTree::leaves_idle(const std::vector<int>& partition_idxs,
                               int num_partitions) const {
  std::vector<bool> used(num_partitions, false);
  for (int idx = 0; idx < num_nodes(); ++idx) {
    if (has_state_[idx]) used[partition_idxs[idx]] = true;
  }
  return std::find(used.begin(), used.end(), false) != used.end();
}

}  // namespace smp::partition
