#include "csrc/partition/module_tree.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "csrc/common/check.h"

namespace smp::partition {

namespace {

void check_costs(const std::string& name, double compute,
                 int64_t activation_bytes) {
  SMP_CHECK_VALUE(
      compute >= 0 && std::isfinite(compute) && activation_bytes >= 0,
      "module tree: costs of '", name,
      "' must be finite and not negative; got compute ", compute,
      ", activation_bytes ", activation_bytes);
}

}  // namespace

void ModuleTree::check_idx(int idx) const {
  SMP_CHECK_VALUE(idx >= 0 && idx < num_nodes(), "module tree: node ", idx,
                  " does not exist; the tree has ", num_nodes(), " nodes");
}

int ModuleTree::add_node(std::string name, int parent_idx, int64_t param_bytes,
                         bool has_state, double compute, NodeKind kind,
                         int64_t activation_bytes) {
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
  SMP_CHECK_VALUE(ordered_child_idxs_.empty(), "module tree: '", name,
                  "' is added after set_order; add all nodes first");
  SMP_CHECK_VALUE(param_bytes >= 0, "module tree: param_bytes of '", name,
                  "' must not be negative; got ", param_bytes);
  check_costs(name, compute, activation_bytes);
  Node node;
  node.name = std::move(name);
  node.parent_idx = parent_idx;
  node.param_bytes = param_bytes;
  node.compute = compute;
  node.activation_bytes = activation_bytes;
  node.has_state = has_state;
  node.kind = kind;
  nodes_.push_back(std::move(node));
  tie_parent_.push_back(idx);
  if (idx > 0) nodes_[parent_idx].child_idxs.push_back(idx);
  return idx;
}

void ModuleTree::set_costs(int idx, double compute, int64_t activation_bytes,
                           double forward) {
  check_idx(idx);
  check_costs(nodes_[idx].name, compute, activation_bytes);
  SMP_CHECK_VALUE(forward >= 0 && forward <= compute, "module tree: '",
                  nodes_[idx].name, "' has ", forward,
                  " of its compute in forwards; expected 0 to ", compute);
  nodes_[idx].compute = compute;
  nodes_[idx].forward = forward;
  nodes_[idx].activation_bytes = activation_bytes;
}

void ModuleTree::tie(int idx_a, int idx_b) {
  check_idx(idx_a);
  check_idx(idx_b);
  const int first_a = first_of_tie(idx_a);
  const int first_b = first_of_tie(idx_b);
  tie_parent_[std::max(first_a, first_b)] = std::min(first_a, first_b);
}

void ModuleTree::add_alias(int parent_idx, int idx) {
  check_idx(parent_idx);
  check_idx(idx);
  for (int above = parent_idx; above >= 0; above = nodes_[above].parent_idx) {
    SMP_CHECK_VALUE(above != idx, "module tree: '", nodes_[idx].name,
                    "' cannot be below itself as an alias");
  }
  nodes_[parent_idx].alias_idxs.push_back(idx);
}

void ModuleTree::set_order(const std::vector<int>& node_idxs) {
  constexpr int kNever = std::numeric_limits<int>::max();
  std::vector<int> first_call(num_nodes(), kNever);
  for (size_t i = 0; i < node_idxs.size(); ++i) {
    check_idx(node_idxs[i]);
    SMP_CHECK_VALUE(first_call[node_idxs[i]] == kNever, "module tree: node '",
                    nodes_[node_idxs[i]].name,
                    "' is twice in the order; list each at its first call");
    first_call[node_idxs[i]] = static_cast<int>(i);
  }
  for (int idx = num_nodes() - 1; idx > 0; --idx) {
    int& parent_call = first_call[nodes_[idx].parent_idx];
    parent_call = std::min(parent_call, first_call[idx]);
  }
  ordered_child_idxs_.clear();
  for (const Node& node : nodes_) {
    int previous = 0;
    for (int child : node.child_idxs) {
      if (first_call[child] == kNever) first_call[child] = previous;
      previous = first_call[child];
    }
    std::vector<int> ordered = node.child_idxs;
    std::stable_sort(ordered.begin(), ordered.end(), [&](int a, int b) {
      return first_call[a] < first_call[b];
    });
    ordered_child_idxs_.push_back(std::move(ordered));
  }
}

int ModuleTree::add_value(int producer_idx, int64_t num_bytes,
                          std::vector<int> consumer_idxs, bool needs_grad,
                          std::vector<int> source_values, double compute,
                          int64_t activation_bytes) {
  const int id = static_cast<int>(values_.size());
  check_idx(producer_idx);
  for (int idx : consumer_idxs) check_idx(idx);
  SMP_CHECK_VALUE(num_bytes >= 0, "module tree: value ", id, " of '",
                  nodes_[producer_idx].name, "' has ", num_bytes,
                  " bytes; they must not be negative");
  SMP_CHECK_VALUE(std::all_of(source_values.begin(), source_values.end(),
                              [id](int s) { return s >= 0 && s < id; }),
                  "module tree: sources of value ", id, " of '",
                  nodes_[producer_idx].name,
                  "' must be values added before, in [0, ", id, ")");
  check_costs(nodes_[producer_idx].name, compute, activation_bytes);
  SMP_CHECK_VALUE(
      !source_values.empty() || (compute == 0 && activation_bytes == 0),
      "module tree: value ", id, " of '", nodes_[producer_idx].name,
      "' has costs of its own, but no sources; without them they are its "
      "producer's");
  values_.push_back(Value{producer_idx, num_bytes, std::move(consumer_idxs),
                          needs_grad, std::move(source_values), compute,
                          activation_bytes});
  return id;
}

void ModuleTree::set_compute_per_byte(double compute_per_byte) {
  SMP_CHECK_VALUE(compute_per_byte >= 0 && std::isfinite(compute_per_byte),
                  "module tree: compute_per_byte must be finite and not "
                  "negative; got ",
                  compute_per_byte);
  compute_per_byte_ = compute_per_byte;
}

const ModuleTree::Node& ModuleTree::checked_node(int idx) const {
  check_idx(idx);
  return nodes_[idx];
}

void ModuleTree::set_wish(int idx, int partition_idx) {
  check_idx(idx);
  SMP_CHECK_VALUE(partition_idx >= 0, "module tree: '", nodes_[idx].name,
                  "' is set to partition ", partition_idx,
                  "; expected 0 or more");
  wishes_.resize(nodes_.size(), -1);
  wishes_[idx] = partition_idx;
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
