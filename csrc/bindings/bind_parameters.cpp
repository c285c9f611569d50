#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "csrc/bindings/waits.h"
#include "csrc/health/fault_board.h"
#include "csrc/parameters/flat_gathers.h"
#include "csrc/parameters/gather_group.h"
#include "csrc/parameters/parameter_scope.h"
#include "csrc/parameters/parameter_store.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

using comm::CommunicatorPtr;
using parameters::BackwardUses;
using parameters::FlatGathers;
using parameters::ParameterScope;
using parameters::ParameterStore;
using Store = std::shared_ptr<BackwardUses>;

Store make_store(const std::vector<at::Tensor>& params,
                 const std::vector<at::Tensor>& shards,
                 std::vector<std::vector<int>> units,
                 std::vector<std::string> names,
                 std::optional<CommunicatorPtr> group, CommunicatorPtr across,
                 CommunicatorPtr within, CommunicatorPtr control,
                 int64_t max_live_elements, int64_t persistence_threshold,
                 int num_ahead, FaultsPtr faults, std::vector<int> ranks,
                 double timeout_s) {
  ParameterStore::Options options;
  options.max_live_elements = max_live_elements;
  options.persistence_threshold = persistence_threshold;
  options.num_ahead = num_ahead;
  options.wait =
      make_wait_options(timeout_s, std::move(faults), std::move(ranks));
  options.wait.hint =
      "do all ranks that share parameters run the same modules in one order?";
  auto gathers =
      across && within
          ? parameters::make_hierarchical_gathers(
                std::move(across), std::move(within), std::move(control))
          : parameters::make_flat_gathers(group.value_or(nullptr),
                                          std::move(control));
  return std::make_shared<BackwardUses>(std::make_shared<ParameterStore>(
      params, shards, std::move(units), std::move(names), std::move(gathers),
      std::move(options)));
}

void bind_stats(py::module_& m) {
  using Stats = ParameterStore::Stats;
  py::class_<Stats>(m, "ParameterStoreStats")
      .def_readonly("num_gathers", &Stats::num_gathers)
      .def_readonly("gathered_bytes", &Stats::gathered_bytes)
      .def_readonly("num_hits", &Stats::num_hits)
      .def_readonly("num_deviations", &Stats::num_deviations)
      .def_readonly("live_elements", &Stats::live_elements)
      .def_readonly("peak_live_elements", &Stats::peak_live_elements)
      .def_readonly("persistent_elements", &Stats::persistent_elements);
}

void bind_scope(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<ParameterScope>(m, "ParameterScope",
                             "See parameters/parameter_scope.h.")
      .def("leave", &ParameterScope::leave, release_gil(),
           py::arg("results") = std::vector<at::Tensor>());
}

void bind_store(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<BackwardUses, Store>(
      m, "ParameterStore",
      "Sharded parameters and when they are whole; see "
      "parameters/parameter_store.h.")
      .def(py::init(&make_store), release_gil(), py::arg("params"),
           py::arg("shards"), py::arg("units"), py::arg("names"),
           py::arg("group"), py::kw_only(), py::arg("across") = py::none(),
           py::arg("within") = py::none(), py::arg("control") = py::none(),
           py::arg("max_live_elements") = int64_t{1} << 60,
           py::arg("persistence_threshold") = int64_t{0},
           py::arg("num_ahead") = ParameterStore::Options().num_ahead,
           py::arg("faults") = py::none(),
           py::arg("ranks") = std::vector<int>(), py::arg("timeout_s") = 1800.0)
      .def(
          "enter",
          [](const Store& store, std::vector<int> units, bool is_forward) {
            return std::make_unique<ParameterScope>(store, std::move(units),
                                                    is_forward);
          },
          release_gil(), py::arg("units"), py::arg("is_forward") = true,
          "Holds units until `leave`. Collective.")
      .def(
          "read",
          [](const Store& store, int unit) {
            ParameterScope::read(*store, unit);
          },
          release_gil(), py::arg("unit"),
          "A parameter of the unit is about to be read.")
      .def(
          "begin_pass",
          [](const Store& store, int64_t kind) {
            store->store()->begin_pass(kind);
          },
          release_gil(), py::arg("kind"))
      .def(
          "end_pass", [](const Store& store) { store->store()->end_pass(); },
          release_gil())
      .def(
          "meet", [](const Store& store) { store->store()->meet(); },
          release_gil(),
          "Waits until no rank gathers anything any more. Collective.")
      .def(
          "abandon_pass",
          [](const Store& store) { store->store()->abandon_pass(); },
          release_gil())
      .def(
          "mark_stale",
          [](const Store& store) { store->store()->mark_stale(); },
          release_gil(), "The shards have got other values.")
      .def(
          "gather_one",
          [](const Store& store, int param_idx) {
            return store->store()->gather_one(param_idx);
          },
          release_gil(), py::arg("param_idx"),
          "A copy of a whole parameter. Collective.")
      .def_property_readonly("stats", py::cpp_function(
                                          [](const Store& store) {
                                            return store->store()->stats();
                                          },
                                          release_gil()));
}

void bind_gathers(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<FlatGathers, std::shared_ptr<FlatGathers>>(
      m, "FlatGathers",
      "Brings updated parts of flat parameters to all ranks of a shard group, "
      "while other work goes on; see parameters/flat_gathers.h.")
      .def(py::init([](std::vector<at::Tensor> flats, CommunicatorPtr shard,
                       FaultsPtr faults, std::vector<int> ranks,
                       double timeout_s) {
             return std::make_shared<FlatGathers>(
                 std::move(flats), std::move(shard),
                 make_wait_options(timeout_s, std::move(faults),
                                   std::move(ranks)));
           }),
           py::arg("flats"), py::arg("shard"), py::kw_only(),
           py::arg("faults") = py::none(),
           py::arg("ranks") = std::vector<int>(), py::arg("timeout_s") = 1800.0)
      .def("launch", &FlatGathers::launch, NoGil(), "Collective.")
      .def("wait", &FlatGathers::wait, NoGil(), py::arg("flat_idxs"))
      .def("wait_all", &FlatGathers::wait_all, NoGil())
      .def(
          "finish",
          [](FlatGathers& gathers, double timeout_s) {
            gathers.finish(to_ms(timeout_s));
          },
          NoGil(), py::arg("timeout_s"),
          "Waits at the end of a run, when other ranks may have left.")
      .def_property_readonly("pending", &FlatGathers::pending)
      .def_property_readonly("num_gathers", &FlatGathers::num_gathers)
      .def_property_readonly("num_overlapped", &FlatGathers::num_overlapped);
}

}  // namespace

void bind_parameters(py::module_& m) {
  bind_stats(m);
  bind_scope(m);
  bind_store(m);
  bind_gathers(m);
}

}  // namespace smp::bindings
