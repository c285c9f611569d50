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

/// The largest number of edges between the root and a node.
inline int depth_of(const ModuleTree& tree) {
  std::vector<int> depths(tree.num_nodes(), 0);
  for (int idx = 1; idx < tree.num_nodes(); ++idx) {
    depths[idx] = depths[tree.node(idx).parent_idx] + 1;
  }
  return *std::max_element(depths.begin(), depths.end());
}

/// A chain of values through the units: each reads what the one before it made,
/// often after a sum in the code of its parent; some values are read again
/// later, and all begin and end at the root.
inline void add_random_values(std::mt19937& random, ModuleTree* tree,
                              const std::vector<int>& units) {
  std::vector<int> values;
  auto bytes = [&] { return static_cast<int64_t>(100 + random() % 100); };
  auto readers = [&](size_t i) {
    std::vector<int> consumers{i < units.size() ? units[i] : 0};
    if (random() % 6 == 0) consumers.push_back(units[random() % units.size()]);
    return consumers;
  };
  values.push_back(tree->add_value(0, bytes(), readers(0), false));
  for (size_t i = 0; i < units.size(); ++i) {
    const bool sum = random() % 2 == 0;
    const int made = tree->add_value(
        units[i], bytes(), sum ? std::vector<int>{} : readers(i + 1), true);
    if (sum) {
      const int parent_idx = tree->node(units[i]).parent_idx;
      // The last source is where it is made: a sum at what came latest, an
      // activation function with an earlier tensor at its first argument.
      const ModuleTree::Node& parent = tree->node(parent_idx);
      const bool costs = random() % 2 == 0;
      values.push_back(
          tree->add_value(parent_idx, bytes(), readers(i + 1), true,
                          {values.back(), made}, costs ? parent.compute / 8 : 0,
                          costs ? parent.activation_bytes / 8 : 0));
    } else {
      values.push_back(made);
    }
  }
  const bool is_free = random() % 4 == 0;
  tree->set_compute_per_byte(
      is_free ? 0 : 0.002 * static_cast<double>(random() % 50));
}

/// At most `num_units` modules with state and none below, at least three levels
/// deep, with costs of all kinds, ties, lists and values.
inline ModuleTree random_traced_tree(std::mt19937& random, int num_units) {
  ModuleTree tree;
  tree.add_node("", -1, random() % 4 == 0 ? 50 : 0, random() % 4 == 0, 3);
  std::vector<int> inner{0};
  std::vector<int> units;
  auto add_unit = [&](int parent_idx) {
    const int heavy = random() % 6 == 0 ? 5 : 1;
    units.push_back(
        tree.add_node("u" + std::to_string(tree.num_nodes()), parent_idx,
                      heavy * static_cast<int64_t>(random() % 1000), true,
                      static_cast<double>(heavy * (random() % 200)),
                      NodeKind::kPlain, static_cast<int64_t>(random() % 800)));
  };
  for (int i = 0; i < num_units; ++i) {
    // Deeper along the last module, as in real models, or back up.
    const size_t up = random() % 3;
    if (up > 0 && inner.size() > up) inner.resize(inner.size() - up);
    const size_t deepest = i == 0 ? 3 : 2 + random() % 4;
    while (inner.size() < deepest) {
      const bool owns = random() % 5 == 0;
      const auto kind = random() % 3 == 0 ? NodeKind::kList : NodeKind::kPlain;
      const std::string name = "m" + std::to_string(tree.num_nodes());
      inner.push_back(tree.add_node(name, inner.back(), owns ? 60 : 0, owns,
                                    static_cast<double>(random() % 8), kind,
                                    static_cast<int64_t>(random() % 40)));
    }
    add_unit(inner.back());
    if (random() % 4 == 0) {
      tree.add_node("relu", inner.back(), 0, false, 2, NodeKind::kPlain, 30);
    }
  }
  if (random() % 3 == 0) {
    tree.tie(units[0], units[random() % units.size()]);
  }
  add_random_values(random, &tree, units);
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
