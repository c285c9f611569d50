#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/partition/assignment.h"
#include "csrc/partition/module_tree.h"
#include "csrc/partition/tree_partitioner.h"

namespace py = pybind11;

namespace smp::bindings {

using partition::Assignment;
using partition::ModuleTree;
using partition::NodeKind;
using partition::PartitionOptions;

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
           py::arg("compute_ms") = 0.0, py::arg("kind") = NodeKind::kPlain,
           "Appends a node and returns its index; the root has parent -1.")
      .def("tie", &ModuleTree::tie, py::arg("idx_a"), py::arg("idx_b"),
           "The two nodes share a parameter and stay together.")
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
      .def_property_readonly("total_param_bytes",
                             &ModuleTree::total_param_bytes)
      .def("__len__", &ModuleTree::num_nodes);

  py::class_<Assignment>(m, "Assignment", "Which partition owns each node.")
      .def_readonly("num_partitions", &Assignment::num_partitions)
      .def_readonly("partition_idxs", &Assignment::partition_idxs)
      .def_readonly("load_bytes", &Assignment::load_bytes)
      .def_readonly("hash", &Assignment::hash)
      .def(
          "to_text",
          [](const Assignment& assignment, const ModuleTree& tree) {
            return partition::to_text(tree, assignment);
          },
          py::arg("tree"), "The lines of the log.");

  m.def(
      "solve_partition",
      [](const ModuleTree& tree, int num_partitions, double memory_weight) {
        return partition::solve(
            tree, PartitionOptions{num_partitions, memory_weight});
      },
      py::arg("tree"), py::arg("num_partitions"), py::arg("memory_weight"),
      py::call_guard<py::gil_scoped_release>(),
      "Balanced assignment; deterministic.");
  m.def("make_assignment", &partition::make_assignment, py::arg("tree"),
        py::arg("num_partitions"), py::arg("partition_idxs"),
        "Assignment from one given partition per node.");
}

}  // namespace smp::bindings
