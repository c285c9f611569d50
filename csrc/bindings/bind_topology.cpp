#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/topology/host_layout.h"
#include "csrc/topology/process_grid.h"
#include "csrc/topology/shard_interval.h"

namespace py = pybind11;

namespace smp::bindings {

using topology::Coordinates;
using topology::ProcessGrid;
using topology::ShardInterval;

void bind_topology(py::module_& m) {
  using topology::HostLayout;
  py::class_<HostLayout>(m, "HostLayout",
                         "How ranks of a group lie on hosts; see "
                         "topology/host_layout.h.")
      .def_readonly("obstacle", &HostLayout::obstacle,
                    "Why collectives cannot go by hosts; empty: they can.")
      .def_readonly("across", &HostLayout::across,
                    "Group ranks with the same place, by host.")
      .def_readonly("within", &HostLayout::within,
                    "Group ranks of the own host.")
      .def_readonly("is_host_by_host", &HostLayout::is_host_by_host);
  m.def("lay_out_by_hosts", &topology::lay_out_by_hosts, py::arg("hosts"),
        py::arg("group_rank"), "`hosts` by group rank.");

  py::class_<Coordinates>(m, "Coordinates", "Place of a rank on the grid.")
      .def(py::init<int, int, int, int>(), py::arg("pp"), py::arg("tp"),
           py::arg("rdp"), py::arg("cp") = 0)
      .def_readonly("pp", &Coordinates::pp)
      .def_readonly("tp", &Coordinates::tp)
      .def_readonly("rdp", &Coordinates::rdp)
      .def_readonly("cp", &Coordinates::cp);

  py::class_<ProcessGrid>(m, "ProcessGrid",
                          "Which global rank has which place; a group kind is "
                          "one of world, mp, dp, pp, tp, rdp, cp, dp_cp, "
                          "rdp_cp, tp_cp.")
      .def(py::init<int, int, int, int, const std::string&>(),
           py::arg("world_size"), py::arg("pp_size"), py::arg("tp_size"),
           py::arg("cp_size"), py::arg("placement_strategy"))
      .def_property_readonly("world_size", &ProcessGrid::world_size)
      .def_property_readonly("placement", &ProcessGrid::placement)
      .def("coordinates", &ProcessGrid::coordinates, py::arg("global_rank"))
      .def("global_rank", &ProcessGrid::global_rank, py::arg("coordinates"))
      .def("describe", &ProcessGrid::describe, py::arg("global_rank"))
      .def(
          "group",
          [](const ProcessGrid& grid, const std::string& kind, int rank) {
            return grid.group(topology::parse_group_kind(kind), rank);
          },
          py::arg("kind"), py::arg("global_rank"),
          "Global ranks of the group, ascending.")
      .def(
          "groups",
          [](const ProcessGrid& grid, const std::string& kind) {
            return grid.groups(topology::parse_group_kind(kind));
          },
          py::arg("kind"), "All groups of a kind.")
      .def(
          "group_size",
          [](const ProcessGrid& grid, const std::string& kind) {
            return grid.group_size(topology::parse_group_kind(kind));
          },
          py::arg("kind"))
      .def(
          "group_rank",
          [](const ProcessGrid& grid, const std::string& kind, int rank) {
            return grid.group_rank(topology::parse_group_kind(kind), rank);
          },
          py::arg("kind"), py::arg("global_rank"),
          "Position of `global_rank` in its group.");

  py::class_<ShardInterval>(m, "ShardInterval",
                            "Indices [begin, end) of one tensor dim (or of the "
                            "flat tensor: dim -1) of size extent.")
      .def(py::init([](int dim, int64_t begin, int64_t end, int64_t extent) {
             return ShardInterval{dim, begin, end, extent};
           }),
           py::arg("dim"), py::arg("begin"), py::arg("end"), py::arg("extent"))
      .def_static("whole", &ShardInterval::whole, py::arg("extent"),
                  py::arg("dim") = 0)
      .def_static("even", &ShardInterval::even, py::arg("extent"),
                  py::arg("num_shards"), py::arg("shard_idx"),
                  py::arg("dim") = 0)
      .def_static("flat", &ShardInterval::flat, py::arg("numel"),
                  py::arg("num_shards"), py::arg("shard_idx"))
      .def_readonly("dim", &ShardInterval::dim)
      .def_readonly("begin", &ShardInterval::begin)
      .def_readonly("end", &ShardInterval::end)
      .def_readonly("extent", &ShardInterval::extent)
      .def_property_readonly("size", &ShardInterval::size)
      .def_property_readonly("is_whole", &ShardInterval::is_whole)
      .def(
          "shape",
          [](const ShardInterval& shard, const std::vector<int64_t>& shape) {
            return topology::shard_shape(shape, shard);
          },
          py::arg("shape"), "Sizes of the slice of a tensor of sizes `shape`.")
      .def("__eq__", [](const ShardInterval& a,
                        const ShardInterval& b) { return a == b; })
      .def("__hash__",
           [](const ShardInterval& s) {
             return py::hash(py::make_tuple(s.dim, s.begin, s.end, s.extent));
           })
      .def("__repr__", &ShardInterval::describe)
      .def(py::pickle(
          [](const ShardInterval& s) {
            return py::make_tuple(s.dim, s.begin, s.end, s.extent);
          },
          [](const py::tuple& t) {
            return ShardInterval{t[0].cast<int>(), t[1].cast<int64_t>(),
                                 t[2].cast<int64_t>(), t[3].cast<int64_t>()};
          }));
}

}  // namespace smp::bindings
