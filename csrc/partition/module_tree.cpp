#include "csrc/partition/module_tree.h"

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"

namespace smp::partition {

void ModuleTree::check_idx(int idx) const {
  SMP_CHECK_VALUE(idx >= 0 && idx < num_nodes(), "module tree: node ", idx,
                  " does not exist; the tree has ", num_nodes(), " nodes");
}

int ModuleTree::add_node(std::string name, int parent_idx, int64_t param_bytes,
                         bool has_state, double compute_ms, NodeKind kind) {
  const int idx = num_nodes();
  if (idx == 0) {
    SMP_CHECK_VALUE(parent_idx == -1,
                    "module tree: the first node is the root and has parent "
                    "-1; got ",
                    parent_idx);
  } else {
    SMP_CHECK_VALUE(parent_idx >= 0 && parent_idx < idx,
                    "module tree: the parent of '", name,
                    "' must be a node added before, in [0, ", idx, "); got ",
                    parent_idx);
  }
  SMP_CHECK_VALUE(param_bytes >= 0 && compute_ms >= 0,
                  "module tree: costs of '", name,
                  "' must not be negative; got param_bytes ", param_bytes,
                  ", compute_ms ", compute_ms);
  nodes_.push_back(Node{std::move(name),
                        parent_idx,
                        param_bytes,
                        compute_ms,
                        has_state,
                        kind,
                        {}});
  tie_parent_.push_back(idx);
  if (idx > 0) nodes_[parent_idx].child_idxs.push_back(idx);
  return idx;
}

void ModuleTree::tie(int idx_a, int idx_b) {
  check_idx(idx_a);
  check_idx(idx_b);
  const int first_a = first_of_tie(idx_a);
  const int first_b = first_of_tie(idx_b);
  tie_parent_[std::max(first_a, first_b)] = std::min(first_a, first_b);
}

const ModuleTree::Node& ModuleTree::checked_node(int idx) const {
  check_idx(idx);
  return nodes_[idx];
}

int64_t ModuleTree::total_param_bytes() const {
  int64_t total = 0;
  for (const Node& node : nodes_) total += node.param_bytes;
  return total;
}

int ModuleTree::first_of_tie(int idx) const {
  while (tie_parent_[idx] != idx) idx = tie_parent_[idx];
  return idx;
}

}  // namespace smp::partition
