#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace smp::partition {

enum class NodeKind {
  kPlain,
  kList,         ///< its children are layers, to be cut between, not through
  kIndivisible,  ///< everything below stays with this node
};

/// A model as the partitioner sees it: one node per module instance, parents
/// before children, children in registration order. Node 0 is the root. Costs
/// are own costs, without those of children, and for one microbatch.
class ModuleTree {
 public:
  struct Node {
    std::string name;         ///< qualified name; empty for the root
    int parent_idx = -1;      ///< -1 for the root
    int64_t param_bytes = 0;  ///< own parameters
    double compute = 0;       ///< own forward and backward, in any one unit
    double forward = 0;       ///< the part of it in forwards
    int64_t activation_bytes = 0;  ///< made by own code, kept for backward
    bool has_state = false;        ///< owns something that must live somewhere
    NodeKind kind = NodeKind::kPlain;
    std::vector<int> child_idxs;
    std::vector<int> alias_idxs;  ///< nodes registered below this one as well
  };

  /// A tensor made in the own code of one node and read in that of others.
  struct Value {
    int producer_idx = 0;
    int64_t num_bytes = 0;
    std::vector<int> consumer_idxs;
    bool needs_grad = false;
    /// Ids of the values that it is made of, if a split module leaves its
    /// making to the rank that has the data; else empty. It is made where the
    /// last of these values is.
    std::vector<int> source_values;
    double compute = 0;            ///< of making it, part of its producer's
    int64_t activation_bytes = 0;  ///< kept for that, part of its producer's
  };

  /// Appends a node and returns its index.
  /// @throws ValueError if the parent does not exist yet, if a second root is
  ///     added, or if a cost is negative
  int add_node(std::string name, int parent_idx, int64_t param_bytes,
               bool has_state, double compute = 0,
               NodeKind kind = NodeKind::kPlain, int64_t activation_bytes = 0);

  /// Replaces the measurements of a node by a trace.
  /// @throws ValueError for negative costs, or more forward than compute
  void set_costs(int idx, double compute, int64_t activation_bytes,
                 double forward = 0);

  /// Makes two nodes that share a parameter stay together. The bytes of a
  /// shared parameter are counted at one of its nodes only.
  void tie(int idx_a, int idx_b);

  /// Notes that node `idx` is registered below `parent_idx` as well.
  /// @throws ValueError if a node does not exist or would be below itself
  void add_alias(int parent_idx, int idx);

  /// Sets the order of nodes by their first call. Siblings are taken in this
  /// order, each by the first call of anything in its subtree; a sibling that
  /// was never called stays behind the sibling before it. The default is
  /// registration order.
  /// @throws ValueError if a node does not exist or is named twice
  void set_order(const std::vector<int>& node_idxs);

  /// Appends a value and returns its id; ids are in the order of making. Model
  /// inputs are made by the root. A value crosses once to each other rank that
  /// reads it, and its gradient comes back the same way.
  ///
  /// The own code of a split module runs on partition 0. The values it makes
  /// are there unless `source_values` are given: then the value is made where
  /// the last of them is, the others are sent there, and `compute` and
  /// `activation_bytes` (parts of the module's own costs) count there. In a
  /// whole module everything is made where the module is.
  /// @throws ValueError if a node or a source does not exist, or if a cost is
  ///     negative or is given without sources
  int add_value(int producer_idx, int64_t num_bytes,
                std::vector<int> consumer_idxs, bool needs_grad,
                std::vector<int> source_values = {}, double compute = 0,
                int64_t activation_bytes = 0);

  /// Sets the cost of a byte over a boundary, in the unit of `compute`.
  void set_compute_per_byte(double compute_per_byte);
  double compute_per_byte() const { return compute_per_byte_; }

  int num_nodes() const { return static_cast<int>(nodes_.size()); }
  const Node& node(int idx) const { return nodes_[idx]; }
  const std::vector<Node>& nodes() const { return nodes_; }
  /// Returns a node. @throws ValueError if the node does not exist
  const Node& checked_node(int idx) const;

  /// Requests a partition for a node, with all that must stay with it. Nodes
  /// below have requests of their own.
  /// @throws ValueError if the node does not exist, or for a negative partition
  void set_wish(int idx, int partition_idx);
  /// Returns the partition requested for a node; -1 for none.
  int wish(int idx) const {
    return idx < static_cast<int>(wishes_.size()) ? wishes_[idx] : -1;
  }
  bool has_wishes() const { return !wishes_.empty(); }
  const std::vector<Value>& values() const { return values_; }
  int64_t total_param_bytes() const;

  /// Returns the first node of the tie group of `idx`; `idx` itself if untied.
  int first_of_tie(int idx) const;

  /// Returns the children of `idx` in the order of execution.
  const std::vector<int>& ordered_children(int idx) const {
    return ordered_child_idxs_.empty() ? nodes_[idx].child_idxs
                                       : ordered_child_idxs_[idx];
  }

 private:
  void check_idx(int idx) const;

  std::vector<Node> nodes_;
  std::vector<int> tie_parent_;  // union-find; roots are the smallest index
  std::vector<Value> values_;
  std::vector<std::vector<int>> ordered_child_idxs_;  // empty: as registered
  std::vector<int> wishes_;                           // empty: none
  double compute_per_byte_ = 0;
};

}  // namespace smp::partition
