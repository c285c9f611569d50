#pragma once

#include <vector>

#include "csrc/partition/module_tree.h"

namespace smp::partition {

/// A ModuleTree with the rules about modules that have no choice worked in.
///
/// Free to choose are **units**: modules with state and none below them, with
/// whatever must stay with them (the subtree of an indivisible module, modules
/// that share a parameter). Everything else follows from the units' stages:
/// * A module above units is where all of them are. If they are apart it is
///   *split*: its own code, and what it owns itself, is on stage 0.
/// * Modules that share a parameter with a module that can be split are pinned
///   to stage 0, since that is where the latter may have to be.
/// * What has no state in its subtree goes with its parent.
///
/// A unit that is asked for on a partition (ModuleTree::set_wish) is free in
/// the order of execution as others are, and whoever cuts this order looks at
/// the wish; or it is *aside*: where it is asked to be, whatever comes between.
class DecisionTree {
 public:
  struct Unit {
    int place_idx;  ///< the first of its nodes in the order of execution
    bool pinned;    ///< on stage 0 in any case
    int wish;       ///< partition that it is asked to be on; -1: any
    bool aside;     ///< it is there, and takes no part in the order
  };

  /// @param aside  whether units that are asked for somewhere are aside
  explicit DecisionTree(const ModuleTree& tree, bool aside = false);

  const ModuleTree& tree() const { return tree_; }
  int num_nodes() const { return tree_.num_nodes(); }

  /// All nodes in the order of execution, parents before children.
  const std::vector<int>& order() const { return order_; }
  /// In the order of execution.
  const std::vector<Unit>& units() const { return units_; }
  int num_units() const { return static_cast<int>(units_.size()); }
  /// Whether execution begins with a unit that is on stage 0 in any case, so
  /// that stage 0 needs no free one.
  bool begins_pinned() const { return !units_.empty() && units_[0].pinned; }
  /// Whether the order of free units may leave this stage without one.
  bool may_be_empty(int stage) const;
  /// How many stages can get a unit each.
  int most_stages() const {
    return static_cast<int>(free_units_.size()) + (begins_pinned() ? 1 : 0);
  }
  bool has_wishes() const { return tree_.has_wishes(); }
  /// Ids of the units that are neither pinned nor aside, in the order of
  /// execution.
  const std::vector<int>& free_units() const { return free_units_; }

  /// The unit whose stage `idx` takes; -1 for nodes above units, and for those
  /// that go with their parent.
  int unit_of(int idx) const { return unit_of_[idx]; }
  /// Units in the subtree of `idx`, shared and registered twice or not; empty
  /// for parts of a unit and for what has no state.
  const std::vector<int>& below(int idx) const { return below_[idx]; }
  /// The node that decides where `idx` is: itself, or for what has no state
  /// the nearest node above that has.
  int owner(int idx) const { return owner_[idx]; }

  /// How many modules a cut through the own children of `idx` opens, without
  /// the root. Lists are not opened by a cut between their layers.
  int depth(int idx) const { return depth_[idx]; }
  /// Whether it is one of several layers of a list, or below one.
  bool in_layer(int idx) const { return in_layer_[idx]; }

  /// Stage per node from stage per unit.
  std::vector<int> complete(const std::vector<int>& unit_stages) const;
  /// Stage per unit from stage per node.
  std::vector<int> stages_of_units(const std::vector<int>& stages) const;
  /// Whether units below `idx` are elsewhere.
  bool is_split(int idx, const std::vector<int>& stages) const;

 private:
  void find_units();
  void find_wishes(bool aside);
  void find_below();
  void find_depths();

  const ModuleTree& tree_;
  std::vector<int> anchors_;  // first node of what stays together
  std::vector<bool> has_state_below_;
  std::vector<int> order_;
  std::vector<Unit> units_;
  std::vector<int> free_units_;
  std::vector<int> unit_of_;
  std::vector<int> owner_;
  std::vector<std::vector<int>> below_;
  std::vector<int> depth_;
  std::vector<bool> in_layer_;
};

}  // namespace smp::partition
