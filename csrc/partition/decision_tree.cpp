#include "csrc/partition/decision_tree.h"

#include <algorithm>
#include <numeric>

namespace smp::partition {

namespace {

// Returns the top-most indivisible node above each node, or the node itself.
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

// Returns the first atom of each atom's group. A tie between nodes inside two
// indivisible subtrees ties the whole subtrees, and so does a module that is
// registered in both.
std::vector<int> find_anchors(const ModuleTree& tree) {
  const std::vector<int> atoms = find_atoms(tree);
  std::vector<int> group(tree.num_nodes());
  std::iota(group.begin(), group.end(), 0);
  auto first = [&group](int idx) {
    while (group[idx] != idx) idx = group[idx];
    return idx;
  };
  auto join = [&](int idx_a, int idx_b) {
    const int a = first(atoms[idx_a]);
    const int b = first(atoms[idx_b]);
    group[std::max(a, b)] = std::min(a, b);
  };
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    join(idx, tree.first_of_tie(idx));
    if (tree.node(atoms[idx]).kind != NodeKind::kIndivisible) continue;
    for (int alias : tree.node(idx).alias_idxs) join(idx, alias);
  }
  std::vector<int> anchors(tree.num_nodes());
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    anchors[idx] = first(atoms[idx]);
  }
  return anchors;
}

// Returns whether there is state in each subtree, re-used modules included.
std::vector<bool> find_state(const ModuleTree& tree) {
  std::vector<bool> has_state(tree.num_nodes());
  for (bool changed = true; changed;) {
    changed = false;
    for (int idx = tree.num_nodes() - 1; idx >= 0; --idx) {
      const ModuleTree::Node& node = tree.node(idx);
      bool any = node.has_state;
      for (int child : node.child_idxs) any = any || has_state[child];
      for (int alias : node.alias_idxs) any = any || has_state[alias];
      changed = changed || any != has_state[idx];
      has_state[idx] = any;
    }
  }
  return has_state;
}

}  // namespace

DecisionTree::DecisionTree(const ModuleTree& tree, bool aside)
    : tree_(tree),
      anchors_(find_anchors(tree)),
      has_state_below_(tree.num_nodes(), false),
      unit_of_(tree.num_nodes(), -1),
      owner_(tree.num_nodes()),
      below_(tree.num_nodes()),
      depth_(tree.num_nodes(), 0),
      in_layer_(tree.num_nodes(), false) {
  find_units();
  find_wishes(aside);
  find_below();
  for (int idx = 0; idx < num_nodes(); ++idx) {
    const bool decides = idx == 0 || unit_of_[idx] >= 0 || !below_[idx].empty();
    owner_[idx] = decides ? idx : owner_[tree.node(idx).parent_idx];
  }
  find_depths();
}

void DecisionTree::find_units() {
  const std::vector<bool> has_state = find_state(tree_);
  std::vector<int> num_atoms(num_nodes(), 0);  // per group
  std::vector<bool> is_unit(num_nodes(), false);
  std::vector<bool> pinned(num_nodes(), false);
  const std::vector<int> atoms = find_atoms(tree_);
  for (int idx = 0; idx < num_nodes(); ++idx) {
    const ModuleTree::Node& node = tree_.node(idx);
    const int anchor = anchors_[idx];
    is_unit[anchor] = is_unit[anchor] || node.has_state;
    if (atoms[idx] != idx) continue;
    ++num_atoms[anchor];
    if (node.kind == NodeKind::kIndivisible) continue;
    auto any = [&](const std::vector<int>& idxs) {
      return std::any_of(idxs.begin(), idxs.end(),
                         [&](int i) { return has_state[i]; });
    };
    has_state_below_[idx] = any(node.child_idxs) || any(node.alias_idxs);
    if (has_state_below_[idx] || idx == 0) pinned[anchor] = true;
  }
  std::vector<int> unit_of_anchor(num_nodes(), -1);
  std::vector<int> stack{0};
  while (!stack.empty()) {
    const int idx = stack.back();
    stack.pop_back();
    order_.push_back(idx);
    const int anchor = anchors_[idx];
    const bool splits_alone = num_atoms[anchor] == 1 && has_state_below_[idx];
    if (is_unit[anchor] && !splits_alone && unit_of_anchor[anchor] < 0) {
      unit_of_anchor[anchor] = num_units();
      units_.push_back(Unit{idx, pinned[anchor], -1, false});
    }
    const std::vector<int>& children = tree_.ordered_children(idx);
    stack.insert(stack.end(), children.rbegin(), children.rend());
  }
  for (int idx = 0; idx < num_nodes(); ++idx) {
    unit_of_[idx] = unit_of_anchor[anchors_[idx]];
  }
}

void DecisionTree::find_wishes(bool aside) {
  for (int idx = 1; idx < num_nodes(); ++idx) {
    const int id = unit_of_[idx];
    if (id >= 0 && units_[id].wish < 0) units_[id].wish = tree_.wish(idx);
  }
  for (int id = 0; id < num_units(); ++id) {
    Unit& unit = units_[id];
    unit.aside = aside && !unit.pinned && unit.wish >= 0;
    if (!unit.pinned && !unit.aside) free_units_.push_back(id);
  }
}

bool DecisionTree::may_be_empty(int stage) const {
  if (stage == 0 && begins_pinned()) return true;
  return std::ranges::any_of(units_, [stage](const Unit& unit) {
    return unit.aside && unit.wish == stage;
  });
}

void DecisionTree::find_below() {
  for (bool changed = true; changed;) {
    changed = false;
    for (int idx = num_nodes() - 1; idx >= 0; --idx) {
      if (!has_state_below_[idx]) continue;
      std::vector<int> below;
      auto add = [&](int other) {
        if (unit_of_[other] >= 0) below.push_back(unit_of_[other]);
        below.insert(below.end(), below_[other].begin(), below_[other].end());
      };
      for (int child : tree_.node(idx).child_idxs) add(child);
      for (int alias : tree_.node(idx).alias_idxs) add(alias);
      std::sort(below.begin(), below.end());
      below.erase(std::unique(below.begin(), below.end()), below.end());
      changed = changed || below != below_[idx];
      below_[idx] = std::move(below);
    }
  }
}

void DecisionTree::find_depths() {
  std::vector<bool> has_choice(num_nodes(), false);  // in the subtree
  for (int id : free_units_) has_choice[units_[id].place_idx] = true;
  std::vector<int> num_choices(num_nodes(), 0);  // children that have one
  for (int idx = num_nodes() - 1; idx > 0; --idx) {
    if (!has_choice[idx]) continue;
    has_choice[tree_.node(idx).parent_idx] = true;
    ++num_choices[tree_.node(idx).parent_idx];
  }
  for (int idx = 1; idx < num_nodes(); ++idx) {
    const int parent_idx = tree_.node(idx).parent_idx;
    const bool is_list = tree_.node(idx).kind == NodeKind::kList;
    const bool is_layer = tree_.node(parent_idx).kind == NodeKind::kList &&
                          num_choices[parent_idx] > 1;
    in_layer_[idx] = in_layer_[parent_idx] || is_layer;
    depth_[idx] = depth_[parent_idx] + (!is_list || is_layer ? 1 : 0);
  }
}

std::vector<int> DecisionTree::complete(
    const std::vector<int>& unit_stages) const {
  std::vector<int> stages(num_nodes(), 0);
  for (int idx = 1; idx < num_nodes(); ++idx) {
    const std::vector<int>& below = below_[idx];
    if (unit_of_[idx] >= 0) {
      stages[idx] = unit_stages[unit_of_[idx]];
    } else if (owner_[idx] != idx) {
      stages[idx] = stages[owner_[idx]];
    } else {
      const int stage = unit_stages[below.front()];
      const bool together =
          std::all_of(below.begin(), below.end(),
                      [&](int id) { return unit_stages[id] == stage; });
      // The module's own code may have another wish than the units below it.
      const int wish = tree_.wish(idx);
      const bool follows = wish < 0 || wish == units_[below.front()].wish;
      stages[idx] = together && follows ? stage : std::max(0, wish);
    }
  }
  return stages;
}

std::vector<int> DecisionTree::stages_of_units(
    const std::vector<int>& stages) const {
  std::vector<int> unit_stages;
  for (const Unit& unit : units_) unit_stages.push_back(stages[unit.place_idx]);
  return unit_stages;
}

bool DecisionTree::is_split(int idx, const std::vector<int>& stages) const {
  const std::vector<int>& below = below_[idx];
  return std::any_of(below.begin(), below.end(), [&](int id) {
    return stages[units_[id].place_idx] != stages[idx];
  });
}

}  // namespace smp::partition
