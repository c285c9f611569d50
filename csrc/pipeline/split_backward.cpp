#include "csrc/pipeline/split_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace smp::pipeline {
namespace {

using autograd::NodePtr;
using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// The kinds of ends of the graph that lie below a node.
struct Reach {
  bool input = false;
  bool param = false;
};

// Returns whether a node may run in two parts. Nodes of this library send
// requests, or suspend their context; nodes with hooks would call them twice; a
// reentrant checkpoint refuses to run for some gradients only.
bool may_run_in_two_parts(Node& node) {
  if (dynamic_cast<AccumulateGrad*>(&node)) return true;
  if (!node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() ||
      !node.post_hooks().empty() || !node.retains_grad_hooks().empty()) {
    return false;
  }
  const std::string name = node.name();
  return name == "SmpArgumentBackward" ||
         (!name.starts_with("Smp") && name != "CheckpointFunctionBackward");
}

// Returns whether a node computes only the gradients asked for. Nodes of Python
// functions, and so those of torch.compile, raise instead of answering.
bool computes_what_is_asked(Node& node) {
  try {
    return node.is_traceable();
  } catch (const std::exception&) {
    return false;
  }
}

/// The local graph below some edges, with the reach of each node.
class Graph {
 public:
  Graph(const edge_list& roots, const edge_list& inputs) {
    for (const Edge& input : inputs) {
      if (input.is_valid()) inputs_.insert(input.function.get());
    }
    for (const Edge& root : roots) visit(root.function.get());
  }

  bool may_be_split() const { return may_be_split_ && has_param_; }
  Reach reach(const Node* node) const { return reach_.at(node); }
  bool contains(const Node* node) const { return reach_.contains(node); }
  /// Returns the nodes, children before parents.
  const std::vector<Node*>& nodes() const { return nodes_; }

  /// Returns whether an edge leads to parameters and not to inputs.
  bool is_for_weights(const Edge& edge) const {
    if (!edge.is_valid()) return false;
    const Reach below = reach(edge.function.get());
    return below.param && !below.input;
  }

 private:
  // Visits depth first without recursion: graphs are as deep as models are.
  void visit(Node* root) {
    if (reach_.contains(root)) return;
    std::vector<std::pair<Node*, size_t>> path{{root, 0}};
    reach_[root] = {};
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < node->num_outputs()) {
        Node* const child = node->next_edge(next++).function.get();
        if (child && reach_.try_emplace(child).second) {
          path.emplace_back(child, 0);
        }
        continue;
      }
      finish(*node);
      path.pop_back();
    }
  }

  void finish(Node& node) {
    Reach below;
    if (inputs_.contains(&node)) {
      below.input = true;
    } else if (dynamic_cast<AccumulateGrad*>(&node)) {
      below.param = true;
    }
    for (const Edge& edge : node.next_edges()) {
      if (!edge.is_valid()) continue;
      const Reach child = reach_.at(edge.function.get());
      below.input |= child.input;
      below.param |= child.param;
    }
    reach_[&node] = below;
    nodes_.push_back(&node);
    has_param_ |= below.param;
    may_be_split_ = may_be_split_ && may_run_in_two_parts(node);
  }

  std::unordered_set<const Node*> inputs_;
  std::unordered_map<const Node*, Reach> reach_;
  std::vector<Node*> nodes_;
  bool may_be_split_ = true;
  bool has_param_ = false;
};

/// The beginning of the second part: its edges and their gradients.
struct SecondPart {
  edge_list edges;
  variable_list grads;

  void add(Edge edge, at::Tensor grad) {
    if (!grad.defined()) return;
    edges.push_back(std::move(edge));
    grads.push_back(std::move(grad));
  }
};

/// The place where the two parts meet.
///
/// A node of PyTorch computes only the gradients asked for, so a shared node
/// runs twice, each time for other gradients: the second part begins with the
/// gradients that came in. A node of other code computes everything at once: it
/// runs in the first part, and the second part begins with the gradients that
/// came out.
class SplitPoint {
 public:
  explicit SplitPoint(const Graph& graph) {
    std::unordered_set<const Node*> begun;  // by what came out
    for (Node* node : graph.nodes()) {
      if (!graph.reach(node).input) continue;
      std::vector<NodePtr> behind;  // for weights only
      for (const Edge& edge : node->next_edges()) {
        if (graph.is_for_weights(edge)) behind.push_back(edge.function);
      }
      if (behind.empty()) continue;
      if (!computes_what_is_asked(*node)) {
        for (const NodePtr& first : behind) {
          // Hooks of a parameter would see the gradients that come out, and see
          // them again when they enter the second part.
          is_clear_ &= first->tensor_pre_hooks().empty();
          if (begun.insert(first.get()).second) add_edges(first);
        }
        continue;
      }
      const NodePtr shared = owner_of<NodePtr>(*node);
      shared_.emplace(node, shared);
      add_edges(shared);
    }
    for (Node* node : graph.nodes()) {
      const bool runs_second = !graph.reach(node).input || is_shared(node);
      for (const Edge& edge : node->next_edges()) {
        // Otherwise the first part would run a node for the gradients that it
        // passes on, and the second part would run the same node.
        is_clear_ &= !runs_second || !graph.is_for_weights(edge) ||
                     !begun.contains(edge.function.get());
      }
    }
  }

  bool is_clear() const { return is_clear_; }
  const edge_list& edges() const { return edges_; }
  bool is_shared(Node* node) const { return shared_.contains(node); }

  // Makes the second part neither run nor keep what the first part has done.
  void cut(const Graph& graph) {
    for (Node* node : graph.nodes()) {
      if (graph.reach(node).input && !is_shared(node)) {
        node->release_variables();
      }
    }
    for (const auto& [key, node] : shared_) {
      for (Edge& edge : node->next_edges()) {
        if (!graph.is_for_weights(edge)) edge = Edge();
      }
    }
  }

 private:
  void add_edges(const NodePtr& node) {
    for (uint32_t i = 0; i < node->num_inputs(); ++i) {
      edges_.emplace_back(node, i);
    }
  }

  std::unordered_map<Node*, NodePtr> shared_;
  edge_list edges_;
  bool is_clear_ = true;
};

edge_list edges_of(const std::vector<GraphEdge>& edges) {
  edge_list result;
  for (const GraphEdge& edge : edges) {
    result.emplace_back(edge.node, edge.input_nr);
  }
  return result;
}

std::function<void()> second_part(SecondPart second) {
  auto kept = std::make_shared<SecondPart>(std::move(second));
  return [kept] {
    const SecondPart second = std::exchange(*kept, {});
    if (second.edges.empty()) return;
    Engine::get_default_engine().execute(second.edges, second.grads,
                                         /*keep_graph=*/false,
                                         /*create_graph=*/false,
                                         /*accumulate_grad=*/true);
  };
}

}  // namespace

std::optional<InputBackward> run_input_backward(
    const std::vector<GraphEdge>& the_roots,
    const std::vector<at::Tensor>& root_grads,
    const std::vector<GraphEdge>& the_inputs) {
  const edge_list roots = edges_of(the_roots);
  const edge_list inputs = edges_of(the_inputs);
  const Graph graph(roots, inputs);
  if (!graph.may_be_split()) return std::nullopt;
  SplitPoint split(graph);
  if (!split.is_clear()) return std::nullopt;

  SecondPart second;
  edge_list first_edges;
  variable_list first_grads;
  for (size_t i = 0; i < roots.size(); ++i) {
    if (graph.is_for_weights(roots[i])) {
      second.add(roots[i], root_grads[i]);
    } else {
      first_edges.push_back(roots[i]);
      first_grads.push_back(root_grads[i]);
    }
  }
  edge_list wanted;
  std::vector<size_t> wanted_inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Edge& edge = inputs[i];
    if (!edge.is_valid() || !graph.contains(edge.function.get())) continue;
    wanted_inputs.push_back(i);
    wanted.push_back(edge);
  }
  InputBackward result;
  result.input_grads.resize(inputs.size());
  if (!wanted.empty()) {
    const edge_list& met = split.edges();
    wanted.insert(wanted.end(), met.begin(), met.end());
    variable_list grads = Engine::get_default_engine().execute(
        first_edges, first_grads, /*keep_graph=*/true, /*create_graph=*/false,
        /*accumulate_grad=*/false, wanted);
    for (size_t i = 0; i < wanted_inputs.size(); ++i) {
      result.input_grads[wanted_inputs[i]] = dense_grad(std::move(grads[i]));
    }
    for (size_t i = 0; i < met.size(); ++i) {
      second.add(met[i], std::move(grads[wanted_inputs.size() + i]));
    }
    split.cut(graph);
  }
  result.add_weight_grads = second_part(std::move(second));
  return result;
}

}  // namespace smp::pipeline
