#pragma once

#include <vector>

#include "csrc/partition/module_tree.h"

namespace smp::partition {

/// A ModuleTree that applies the rules about modules without a choice.
///
/// **Units** are free to choose: modules with state and none below them, with
/// all that must stay with them (the subtree of an indivisible module, modules
/// that share a parameter). The place of everything else follows from the
/// units' stages:
/// * A module above units is where all of them are. If they are apart it is
///   *split*: its own code, and what it owns itself, is on stage 0.
/// * Modules that share a parameter with a module that can be split are pinned
///   to stage 0, since that is where the latter may have to be.
/// * Modules without state in their subtree go with their parent.
///
/// A unit with a wish for a partition (ModuleTree::set_wish) is free in the
/// order of execution as others are, and the code that cuts this order respects
/// the wish. Or it is *aside*: on its partition, wherever its neighbours are.
class DecisionTree {
 public:
  struct Unit {
    int place_idx;  ///< the first of its nodes in the order of execution
    bool pinned;    ///< on stage 0 in any case
    int wish;       ///< partition that it wishes for; -1: any
    bool aside;     ///< on that partition, and not in the order
  };

  /// @param aside  whether units with a wish are aside
  explicit DecisionTree(const ModuleTree& tree, bool aside = false);

  const ModuleTree& tree() const { return tree_; }
  int num_nodes() const { return tree_.num_nodes(); }

  /// Returns all nodes in the order of execution, parents before children.
  const std::vector<int>& order() const { return order_; }
  /// Returns the units in the order of execution.
  const std::vector<Unit>& units() const { return units_; }
  int num_units() const { return static_cast<int>(units_.size()); }
  /// Returns whether execution begins with a unit that is on stage 0 in any
  /// case, so that stage 0 needs no free unit.
  bool begins_pinned() const { return !units_.empty() && units_[0].pinned; }
  /// Returns whether the order of free units may leave this stage without one.
  bool may_be_empty(int stage) const;
  /// Returns the largest number of stages that can get a unit each.
  int most_stages() const {
    return static_cast<int>(free_units_.size()) + (begins_pinned() ? 1 : 0);
  }
  bool has_wishes() const { return tree_.has_wishes(); }
  /// Returns ids of the units that are neither pinned nor aside, in the order
  /// of execution.
  const std::vector<int>& free_units() const { return free_units_; }

  /// Returns the unit whose stage `idx` takes; -1 for nodes above units, and
  /// for nodes that go with their parent.
  int unit_of(int idx) const { return unit_of_[idx]; }
  /// Returns the units in the subtree of `idx`, shared and registered twice or
  /// not; empty for parts of a unit and for subtrees without state.
  const std::vector<int>& below(int idx) const { return below_[idx]; }
  /// Returns the node that decides where `idx` is: itself, or for a node
  /// without state the nearest node above with state.
  int owner(int idx) const { return owner_[idx]; }

  /// Returns the number of modules that a cut through the own children of `idx`
  /// opens, without the root. A cut between the layers of a list does not open
  /// it.
  int depth(int idx) const { return depth_[idx]; }
  /// Returns whether a node is one of several layers of a list, or below one.
  bool in_layer(int idx) const { return in_layer_[idx]; }

  /// Returns the stage of each node from the stage of each unit.
  std::vector<int> complete(const std::vector<int>& unit_stages) const;
  /// Returns the stage of each unit from the stage of each node.
  std::vector<int> stages_of_units(const std::vector<int>& stages) const;
  /// Returns whether units below `idx` are on another stage.
  bool is_split(int idx, const std::vector<int>& stages) const;

 private:
  void find_units();
  void find_wishes(bool aside);
  void find_below();
  void find_depths();

  const ModuleTree& tree_;
  std::vector<int> anchors_;  // first node of those that stay together
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
