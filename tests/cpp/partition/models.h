#pragma once

#include <string>
#include <vector>

#include "csrc/partition/module_tree.h"

namespace smp::partition::testing {

/// A stack of transformer blocks; sizes in elements, two bytes each.
struct StackShape {
  std::string name;
  int num_blocks;
  int hidden;
  int attention;   ///< width of queries and of the output's input
  int key_values;  ///< width of keys and of values
  int mlp;
  bool gated;     ///< three matrices in the MLP instead of two
  bool crossing;  ///< attention to another stack as well
};

struct ModelShape {
  int vocabulary;
  int positions;  ///< learned ones; 0 for none
  bool tied_head;
  std::vector<StackShape> stacks;
};

inline const ModelShape kGpt2Xl{
    50257, 1024, true, {{"h", 48, 1600, 1600, 1600, 6400, false, false}}};
inline const ModelShape kGptJ{
    50400, 0, false, {{"h", 28, 4096, 4096, 4096, 16384, false, false}}};
inline const ModelShape kLlama8b{
    128256, 0, false, {{"layers", 32, 4096, 4096, 1024, 14336, true, false}}};
inline const ModelShape kT53b{
    32128,
    0,
    true,
    {{"encoder", 24, 1024, 4096, 4096, 16384, false, false},
     {"decoder", 24, 1024, 4096, 4096, 16384, false, true}}};

/// Builds the module tree of a model with parameters, costs and values as a
/// trace of 512 tokens gives them. `halves` are the nodes of attention and MLP
/// with their norms, and what is outside of blocks, in the order of execution.
class ModelTree {
 public:
  explicit ModelTree(const ModelShape& shape) {
    const int width = shape.stacks[0].hidden;
    const int64_t table = 2LL * shape.vocabulary * width;
    tree.add_node("", -1, 0, false);
    const int ids = value(0, 8, {});
    const int wte = half("wte", 0, table, 0, kTokens * width * 2);
    read(ids, wte);
    int hidden = value(wte, width, {});
    if (shape.positions > 0) {
      const int wpe =
          half("wpe", 0, 2LL * shape.positions * width, 0, kTokens * width * 2);
      hidden = value(0, width, {hidden, value(wpe, width, {})});
    }
    int memory = -1;
    for (const StackShape& stack : shape.stacks) {
      if (memory >= 0) hidden = value(wte, width, {});
      hidden = add_stack(stack, hidden, memory);
      memory = hidden;
    }
    const int head = half("head", 0, shape.tied_head ? 0 : table,
                          6.0 * kTokens * width * shape.vocabulary,
                          kTokens * shape.vocabulary * 2);
    read(hidden, head);
    // The loss is made where the logits are.
    value(head, shape.vocabulary, {});
    if (shape.tied_head) tree.tie(wte, head);
    flush();
  }

  ModuleTree tree;
  std::vector<std::vector<int>> halves;
  std::vector<int> blocks;       ///< their nodes
  std::vector<int> half_blocks;  ///< per half its block's number, or -1

 private:
  static constexpr int64_t kTokens = 512;

  struct PlannedValue {
    int producer;
    int64_t bytes;
    std::vector<int> sources;
    std::vector<int> consumers;
  };

  int value(int producer, int width, std::vector<int> sources) {
    values_.push_back({producer, kTokens * width * 2, std::move(sources), {}});
    return static_cast<int>(values_.size()) - 1;
  }
  void read(int value, int node) { values_[value].consumers.push_back(node); }
  void flush() {
    for (const PlannedValue& v : values_) {
      tree.add_value(v.producer, v.bytes, v.consumers,
                     v.producer != 0 || !v.sources.empty(), v.sources);
    }
  }

  int half(const std::string& name, int parent, int64_t bytes, double compute,
           int64_t activations) {
    const int idx = tree.add_node(name, parent, bytes, true, compute,
                                  NodeKind::kPlain, activations);
    halves.push_back({idx});
    half_blocks.push_back(-1);
    return idx;
  }

  int linear(const std::string& name, int parent, int in, int out, int input) {
    const int idx = tree.add_node(name, parent, 2LL * in * out, true,
                                  6.0 * kTokens * in * out, NodeKind::kPlain,
                                  kTokens * out * 2);
    if (input >= 0) read(input, idx);
    halves.back().push_back(idx);
    return idx;
  }

  // norm, then the module, then the sum with what came in.
  int add_attention(const StackShape& s, const std::string& name, int parent,
                    int hidden, int source) {
    halves.push_back({});
    half_blocks.push_back(static_cast<int>(blocks.size()) - 1);
    const int norm = linear(name + ".norm", parent, s.hidden, 1, hidden);
    const int normed = value(norm, s.hidden, {});
    const int attn = tree.add_node(name, parent, 0, false,
                                   12.0 * kTokens * kTokens * s.attention,
                                   NodeKind::kPlain, kTokens * s.attention * 2);
    const int keyed = source >= 0 ? source : normed;
    const int q = linear(name + ".q", attn, s.hidden, s.attention, normed);
    const int k = linear(name + ".k", attn, s.hidden, s.key_values, keyed);
    const int v = linear(name + ".v", attn, s.hidden, s.key_values, keyed);
    read(value(q, s.attention, {}), attn);
    read(value(k, s.key_values, {}), attn);
    read(value(v, s.key_values, {}), attn);
    const int mixed = value(attn, s.attention, {});
    const int o = linear(name + ".o", attn, s.attention, s.hidden, mixed);
    return value(parent, s.hidden, {hidden, value(o, s.hidden, {})});
  }

  int add_mlp(const StackShape& s, const std::string& name, int parent,
              int hidden) {
    halves.push_back({});
    half_blocks.push_back(static_cast<int>(blocks.size()) - 1);
    const int norm = linear(name + ".norm", parent, s.hidden, 1, hidden);
    const int normed = value(norm, s.hidden, {});
    const int mlp = tree.add_node(name, parent, 0, false, 0, NodeKind::kPlain,
                                  kTokens * s.mlp * 2);
    read(value(linear(name + ".in", mlp, s.hidden, s.mlp, normed), s.mlp, {}),
         mlp);
    if (s.gated) {
      const int gate = linear(name + ".gate", mlp, s.hidden, s.mlp, normed);
      read(value(gate, s.mlp, {}), mlp);
    }
    const int act = value(mlp, s.mlp, {});
    const int out = linear(name + ".out", mlp, s.mlp, s.hidden, act);
    return value(parent, s.hidden, {hidden, value(out, s.hidden, {})});
  }

  int add_stack(const StackShape& s, int hidden, int memory) {
    const int stack = tree.add_node(s.name, 0, 0, false);
    const int list =
        tree.add_node(s.name + ".block", stack, 0, false, 0, NodeKind::kList);
    for (int i = 0; i < s.num_blocks; ++i) {
      const std::string name = s.name + ".block." + std::to_string(i);
      const int block = tree.add_node(name, list, 0, false);
      blocks.push_back(block);
      hidden = add_attention(s, name + ".attn", block, hidden, -1);
      if (s.crossing) {
        hidden = add_attention(s, name + ".cross", block, hidden, memory);
      }
      hidden = add_mlp(s, name + ".mlp", block, hidden);
    }
    const int norm =
        half(s.name + ".norm", stack, 2 * s.hidden, 0, kTokens * s.hidden * 2);
    read(hidden, norm);
    return value(norm, s.hidden, {});
  }

  std::vector<PlannedValue> values_;
};

}  // namespace smp::partition::testing
