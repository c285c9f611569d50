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

/// What the partitioner knows of a model: one node per module instance,
/// parents before children, children in registration order. Node 0 is the root.
class ModuleTree {
 public:
  struct Node {
    std::string name;         ///< qualified name; empty for the root
    int parent_idx = -1;      ///< -1 for the root
    int64_t param_bytes = 0;  ///< own parameters, without those of children
    double compute_ms = 0;    ///< own time, without that of children
    bool has_state = false;   ///< owns something that must live somewhere
    NodeKind kind = NodeKind::kPlain;
    std::vector<int> child_idxs;
  };

  /// Appends a node and returns its index.
  /// @throws ValueError if the parent does not exist yet, if a second root is
  ///     added, or if a cost is negative
  int add_node(std::string name, int parent_idx, int64_t param_bytes,
               bool has_state, double compute_ms = 0,
               NodeKind kind = NodeKind::kPlain);

  /// Says that the two nodes share a parameter and must stay together. The
  /// bytes of a shared parameter are counted at one of its nodes only.
  void tie(int idx_a, int idx_b);

  int num_nodes() const { return static_cast<int>(nodes_.size()); }
  const Node& node(int idx) const { return nodes_[idx]; }
  /// @throws ValueError if the node does not exist
  const Node& checked_node(int idx) const;
  int64_t total_param_bytes() const;

  /// The first node of the tie group of `idx`; `idx` itself if untied.
  int first_of_tie(int idx) const;

 private:
  void check_idx(int idx) const;

  std::vector<Node> nodes_;
  std::vector<int> tie_parent_;  // union-find; roots are the smallest index
};

}  // namespace smp::partition
