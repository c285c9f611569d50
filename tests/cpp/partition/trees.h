#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "csrc/partition/assignment.h"
#include "csrc/partition/module_tree.h"

namespace smp::partition::testing {

/// A tree of random shape; about a third of the nodes hold no state.
inline ModuleTree random_tree(std::mt19937& random, int num_nodes) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (int idx = 1; idx < num_nodes; ++idx) {
    const int parent_idx = static_cast<int>(random() % idx);
    const bool has_state = random() % 3 != 0;
    const int64_t bytes = has_state ? static_cast<int64_t>(random() % 1000) : 0;
    tree.add_node(
        "m" + std::to_string(idx), parent_idx, bytes, has_state,
        has_state ? static_cast<double>(random() % 7) : 0,
        static_cast<NodeKind>(random() % 9 < 2 ? 1 + random() % 2 : 0));
  }
  for (int i = 0; i < num_nodes / 8; ++i) {
    const int a = static_cast<int>(random() % num_nodes);
    const int b = static_cast<int>(random() % num_nodes);
    if (tree.node(a).has_state && tree.node(b).has_state) tree.tie(a, b);
  }
  return tree;
}

struct GptShape {
  int num_layers = 12;
  double embedding_layers = 1;  ///< size of the embedding, in layers
  bool tied_head = true;
};

inline constexpr int64_t kLayerBytes = 1200;

/// wte, wpe, drop, h.0 ... h.n (ln_1, attn, ln_2, mlp), ln_f, lm_head.
inline ModuleTree gpt_tree(const GptShape& shape) {
  ModuleTree tree;
  const auto embedding =
      static_cast<int64_t>(shape.embedding_layers * kLayerBytes);
  tree.add_node("", -1, 0, false);
  const int body = tree.add_node("transformer", 0, 0, false);
  const int wte = tree.add_node("transformer.wte", body, embedding, true);
  tree.add_node("transformer.wpe", body, 10, true);
  tree.add_node("transformer.drop", body, 0, false);
  const int list =
      tree.add_node("transformer.h", body, 0, false, 0, NodeKind::kList);
  for (int i = 0; i < shape.num_layers; ++i) {
    const std::string name = "transformer.h." + std::to_string(i);
    const int block = tree.add_node(name, list, 0, false);
    tree.add_node(name + ".ln_1", block, 2, true);
    tree.add_node(name + ".attn", block, 398, true);
    tree.add_node(name + ".ln_2", block, 2, true);
    const int mlp = tree.add_node(name + ".mlp", block, 0, false);
    tree.add_node(name + ".mlp.fc_in", mlp, 399, true);
    tree.add_node(name + ".mlp.fc_out", mlp, 399, true);
    tree.add_node(name + ".mlp.act", mlp, 0, false);
  }
  tree.add_node("transformer.ln_f", body, 2, true);
  const int head =
      tree.add_node("lm_head", 0, shape.tied_head ? 0 : embedding, true);
  if (shape.tied_head) tree.tie(wte, head);
  return tree;
}

inline int find_node(const ModuleTree& tree, const std::string& name) {
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    if (tree.node(idx).name == name) return idx;
  }
  return -1;
}

/// The largest load relative to the mean.
inline double imbalance(const Assignment& assignment) {
  double largest = 0;
  double total = 0;
  for (int64_t bytes : assignment.load_bytes) {
    largest = std::max(largest, static_cast<double>(bytes));
    total += static_cast<double>(bytes);
  }
  return largest * assignment.num_partitions / total;
}

}  // namespace smp::partition::testing
