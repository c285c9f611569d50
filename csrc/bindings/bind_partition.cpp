#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "csrc/partition/assignment.h"
#include "csrc/partition/module_tree.h"
#include "csrc/partition/tree_partitioner.h"
#include "csrc/partition/wishes.h"

namespace py = pybind11;

namespace smp::bindings {

using partition::Assignment;
using partition::Evaluation;
using partition::ModuleTree;
using partition::NodeKind;
using partition::PartitionOptions;
using partition::Placement;
using partition::PlacementRule;

namespace {

void bind_options(py::module_& m) {
  py::class_<PartitionOptions>(m, "PartitionOptions")
      .def(py::init([](int num_partitions, double memory_weight, int num_chunks,
                       std::vector<int> kept_microbatches, double state_factor,
                       std::vector<int64_t> memory_limits, bool must_fit,
                       double lead_weight, std::vector<double> speeds) {
             return PartitionOptions{
                 num_partitions,   memory_weight,
                 num_chunks,       std::move(kept_microbatches),
                 state_factor,     std::move(memory_limits),
                 must_fit,         lead_weight,
                 std::move(speeds)};
           }),
           py::arg("num_partitions"), py::arg("memory_weight") = 0.8,
           py::arg("num_chunks") = 1,
           py::arg("kept_microbatches") = std::vector<int>{},
           py::arg("state_factor") = 4.0,
           py::arg("memory_limits") = std::vector<int64_t>{},
           py::arg("must_fit") = true, py::arg("lead_weight") = 0.0,
           py::arg("speeds") = std::vector<double>{})
      .def_readonly("num_partitions", &PartitionOptions::num_partitions)
      .def_readonly("memory_weight", &PartitionOptions::memory_weight)
      .def_readonly("num_chunks", &PartitionOptions::num_chunks)
      .def_readonly("kept_microbatches", &PartitionOptions::kept_microbatches)
      .def_readonly("state_factor", &PartitionOptions::state_factor)
      .def_readonly("memory_limits", &PartitionOptions::memory_limits)
      .def_readonly("must_fit", &PartitionOptions::must_fit)
      .def_readonly("lead_weight", &PartitionOptions::lead_weight)
      .def_readonly("speeds", &PartitionOptions::speeds);

  py::enum_<PlacementRule>(m, "PlacementRule", "Why a module is where it is.")
      .value("DRIVER", PlacementRule::kDriver)
      .value("ASKED", PlacementRule::kAsked)
      .value("UNIT", PlacementRule::kUnit)
      .value("TOGETHER", PlacementRule::kTogether)
      .value("SPLIT", PlacementRule::kSplit)
      .value("TIED", PlacementRule::kTied)
      .value("FOLLOWS", PlacementRule::kFollows);

  py::class_<Placement>(m, "Placement")
      .def_readonly("rule", &Placement::rule)
      .def_readonly("other_idx", &Placement::other_idx);
}

void bind_assignment(py::module_& m) {
  py::class_<Assignment>(m, "Assignment", "Which partition owns each node.")
      .def_readonly("num_partitions", &Assignment::num_partitions)
      .def_readonly("num_chunks", &Assignment::num_chunks)
      .def_readonly("partition_idxs", &Assignment::partition_idxs)
      .def_readonly("chunk_idxs", &Assignment::chunk_idxs)
      .def_readonly("load_bytes", &Assignment::load_bytes)
      .def_readonly("hash", &Assignment::hash)
      .def(
          "to_text",
          [](const Assignment& assignment, const ModuleTree& tree) {
            return partition::to_text(tree, assignment);
          },
          py::arg("tree"), "The lines of the log.");

  py::class_<Evaluation>(m, "Evaluation", "What an assignment costs.")
      .def_readonly("loads", &Evaluation::loads, "Per stage.")
      .def_readonly("param_bytes", &Evaluation::param_bytes, "Per stage.")
      .def_readonly("activation_bytes", &Evaluation::activation_bytes,
                    "Per stage, one microbatch, with copies.")
      .def_readonly("compute", &Evaluation::compute, "Per stage.")
      .def_readonly("forward", &Evaluation::forward,
                    "Per stage, the part of compute in forwards.")
      .def_readonly("transfer_bytes", &Evaluation::transfer_bytes,
                    "Per stage, sent and received.")
      .def_readonly("memory_bytes", &Evaluation::memory_bytes,
                    "Per partition, at the peak.")
      .def_readonly("boundary_bytes", &Evaluation::boundary_bytes,
                    "From partition i to j at i * num_partitions + j.")
      .def_readonly("crossing_bytes", &Evaluation::crossing_bytes)
      .def_readonly("largest_load", &Evaluation::largest_load)
      .def_readonly("excess_bytes", &Evaluation::excess_bytes,
                    "Above the limits, of all partitions.");
}

}  // namespace

void bind_partition(py::module_& m) {
  py::enum_<NodeKind>(m, "NodeKind", "How a module may be cut.")
      .value("PLAIN", NodeKind::kPlain)
      .value("LIST", NodeKind::kList, "Cut between children, not through them.")
      .value("INDIVISIBLE", NodeKind::kIndivisible, "Kept whole.");

  py::class_<ModuleTree>(m, "ModuleTree",
                         "One node per module, parents before children.")
      .def(py::init<>())
      .def("add_node", &ModuleTree::add_node, py::arg("name"),
           py::arg("parent_idx"), py::arg("param_bytes"), py::arg("has_state"),
           py::arg("compute") = 0.0, py::arg("kind") = NodeKind::kPlain,
           py::arg("activation_bytes") = 0,
           "Appends a node and returns its index; the root has parent -1.")
      .def("set_costs", &ModuleTree::set_costs, py::arg("idx"),
           py::arg("compute"), py::arg("activation_bytes"),
           py::arg("forward") = 0.0,
           "Own costs of one microbatch, as a trace measured them; of compute "
           "the part in forwards.")
      .def("set_order", &ModuleTree::set_order, py::arg("node_idxs"),
           "Nodes in the order of their first call.")
      .def("add_alias", &ModuleTree::add_alias, py::arg("parent_idx"),
           py::arg("idx"), "The node is registered below this one as well.")
      .def("add_value", &ModuleTree::add_value, py::arg("producer_idx"),
           py::arg("num_bytes"), py::arg("consumer_idxs"),
           py::arg("needs_grad"), py::arg("source_values") = std::vector<int>{},
           py::arg("compute") = 0.0, py::arg("activation_bytes") = 0,
           "A tensor that own code of one node makes and that of others reads; "
           "returns its id. With sources a split module leaves it, and its "
           "costs, to where the last of them is.")
      .def("execution_order", &partition::execution_order,
           "All nodes in the order of execution, parents before children.")
      .def_property("compute_per_byte", &ModuleTree::compute_per_byte,
                    &ModuleTree::set_compute_per_byte,
                    "Cost of a byte over a boundary in the unit of compute.")
      .def("tie", &ModuleTree::tie, py::arg("idx_a"), py::arg("idx_b"),
           "The two nodes share a parameter and stay together.")
      .def("set_wish", &ModuleTree::set_wish, py::arg("idx"),
           py::arg("partition_idx"),
           "Asks for a node to be on a partition; nodes below by themselves.")
      .def(
          "name",
          [](const ModuleTree& tree, int idx) {
            return tree.checked_node(idx).name;
          },
          py::arg("idx"))
      .def(
          "param_bytes",
          [](const ModuleTree& tree, int idx) {
            return tree.checked_node(idx).param_bytes;
          },
          py::arg("idx"), "Own parameters, without those of children.")
      .def(
          "parent_idx",
          [](const ModuleTree& tree, int idx) {
            return tree.checked_node(idx).parent_idx;
          },
          py::arg("idx"), "-1 for the root.")
      .def(
          "compute",
          [](const ModuleTree& tree, int idx) {
            return tree.checked_node(idx).compute;
          },
          py::arg("idx"), "Own forward and backward, without children.")
      .def(
          "activation_bytes",
          [](const ModuleTree& tree, int idx) {
            return tree.checked_node(idx).activation_bytes;
          },
          py::arg("idx"), "Own, per microbatch, without children.")
      .def_property_readonly(
          "num_values",
          [](const ModuleTree& tree) { return tree.values().size(); })
      .def_property_readonly("total_param_bytes",
                             &ModuleTree::total_param_bytes)
      .def("__len__", &ModuleTree::num_nodes);

  bind_options(m);
  bind_assignment(m);
  m.def("solve_partition", &partition::solve, py::arg("tree"),
        py::arg("options"), py::call_guard<py::gil_scoped_release>(),
        "Balanced assignment; deterministic.");
  m.def("make_assignment", &partition::make_assignment, py::arg("tree"),
        py::arg("num_partitions"), py::arg("partition_idxs"),
        py::arg("num_chunks") = 1, py::arg("chunk_idxs") = std::vector<int>{},
        "Assignment from one given partition, and chunk, per node.");
  m.def("check_wishes", &partition::check_wishes, py::arg("tree"),
        py::arg("num_partitions"),
        "Raises a ValueError for wishes that contradict each other.");
  m.def("unit_places", &partition::unit_places, py::arg("tree"),
        "Per node the first node of its unit; -1 for what follows from units.");
  m.def("complete_partition", &partition::complete, py::arg("tree"),
        py::arg("num_partitions"), py::arg("partition_idxs"),
        py::arg("num_chunks"), py::arg("chunk_idxs"),
        "Assignment from the places of units.");
  m.def("evaluate_partition", &partition::evaluate, py::arg("tree"),
        py::arg("assignment"), py::arg("options"), "What an assignment costs.");
  m.def("move_in_partition", &partition::move, py::arg("tree"),
        py::arg("assignment"), py::arg("node_idx"), py::arg("partition_idx"),
        "The assignment with a subtree on another partition.");
  m.def("explain_placement", &partition::explain_placement, py::arg("tree"),
        py::arg("assignment"), py::arg("node_idx"),
        "Rule by which a node is where it is, and the node it depends on.");
}

}  // namespace smp::bindings
