#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/schedule/policy.h"
#include "csrc/schedule/schedule_text.h"
#include "csrc/schedule/simulator.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

using schedule::BoundaryCost;
using schedule::Policy;
using schedule::RankUsage;
using schedule::SimulationInput;
using schedule::SimulationResult;
using schedule::StageCost;
using schedule::TimelineEntry;

void bind_results(py::module_& m) {
  py::class_<RankUsage>(m, "RankUsage", "What a simulated step asks of a rank.")
      .def_readonly("busy_ms", &RankUsage::busy_ms)
      .def_readonly("bubble_ms", &RankUsage::bubble_ms)
      .def_readonly("peak_activations", &RankUsage::peak_activations)
      .def_readonly("peak_activation_bytes", &RankUsage::peak_activation_bytes);
  py::class_<TimelineEntry>(m, "TimelineEntry", "One action of one rank.")
      .def_readonly("rank", &TimelineEntry::rank)
      .def_readonly("stage", &TimelineEntry::stage)
      .def_property_readonly(
          "action",
          [](const TimelineEntry& e) { return schedule::to_string(e.action); })
      .def_readonly("start_ms", &TimelineEntry::start_ms)
      .def_readonly("end_ms", &TimelineEntry::end_ms);
  py::class_<SimulationResult>(m, "SimulationResult", "A simulated step.")
      .def_readonly("makespan_ms", &SimulationResult::makespan_ms)
      .def_readonly("ranks", &SimulationResult::ranks)
      .def_property_readonly("executed",
                             [](const SimulationResult& result) {
                               return schedule::to_string(result.executed);
                             })
      .def_readonly("timeline", &SimulationResult::timeline);
}

std::vector<int> kept_microbatches(const Policy& policy, int num_partitions,
                                   int num_chunks, int num_microbatches,
                                   int active_microbatches) {
  std::vector<int> kept;
  for (int depth = 0; depth < num_partitions; ++depth) {
    kept.push_back(
        policy.kept_microbatches({num_partitions, num_chunks, num_microbatches},
                                 active_microbatches, depth));
  }
  return kept;
}

void bind_policy(py::module_& m) {
  py::class_<Policy>(m, "Policy", "What depends on the kind of schedule.")
      .def_property_readonly("name", &Policy::name)
      .def_property_readonly("default_chunks", &Policy::default_chunks)
      .def_property_readonly(
          "forwards_come_first",
          [](const Policy& policy) {
            return !policy.may_begin_backward({.num_forwards_pending = 1});
          },
          "No backward begins while the driver has forwards to do.")
      .def("default_active_microbatches", &Policy::default_active_microbatches,
           py::arg("num_partitions"), py::arg("num_microbatches"))
      .def("kept_microbatches", &kept_microbatches, py::arg("num_partitions"),
           py::arg("num_chunks"), py::arg("num_microbatches"),
           py::arg("active_microbatches"),
           "Per rank, of how many microbatches it keeps activations.");
  m.def("policy_names", &schedule::policy_names);
  m.def("make_policy", &schedule::make_policy, py::arg("name"));
  m.attr("DEFAULT_POLICY") = schedule::kDefaultPolicy;
}

}  // namespace

void bind_schedule(py::module_& m) {
  bind_policy(m);
  py::class_<StageCost>(m, "StageCost", "One link of the chain.")
      .def(py::init<int, double, double, double, int64_t>(), py::arg("rank"),
           py::arg("forward_ms"), py::arg("backward_ms"), py::arg("weight_ms"),
           py::arg("activation_bytes"));
  py::class_<BoundaryCost>(m, "BoundaryCost", "Between a stage and the next.")
      .def(py::init<double, double, int64_t, int64_t>(), py::arg("latency_ms"),
           py::arg("ms_per_byte"), py::arg("forward_bytes"),
           py::arg("backward_bytes"));
  bind_results(m);

  m.def(
      "simulate_policy",
      [](std::vector<StageCost> stages, std::vector<BoundaryCost> boundaries,
         int num_microbatches, int active_microbatches,
         const std::string& policy) {
        return schedule::simulate({std::move(stages), std::move(boundaries),
                                   num_microbatches, active_microbatches},
                                  policy);
      },
      py::arg("stages"), py::arg("boundaries"), py::arg("num_microbatches"),
      py::arg("active_microbatches"), py::arg("policy"),
      py::call_guard<py::gil_scoped_release>(),
      "A step under a policy; 0 active microbatches ask the policy.");
  m.def(
      "simulate_lists",
      [](std::vector<StageCost> stages, std::vector<BoundaryCost> boundaries,
         int num_microbatches, int active_microbatches,
         const std::string& text) {
        return schedule::simulate_lists(
            {std::move(stages), std::move(boundaries), num_microbatches,
             active_microbatches},
            schedule::parse_schedule(text));
      },
      py::arg("stages"), py::arg("boundaries"), py::arg("num_microbatches"),
      py::arg("active_microbatches"), py::arg("schedule"),
      py::call_guard<py::gil_scoped_release>(),
      "A step in which each rank runs its line of a schedule.");
  m.def(
      "plan_schedule",
      [](const std::string& name, int num_ranks, int num_microbatches,
         int num_chunks) {
        return schedule::to_string(schedule::make_plan(
            name, {num_ranks, num_chunks, num_microbatches}));
      },
      py::arg("name"), py::arg("num_ranks"), py::arg("num_microbatches"),
      py::arg("num_chunks"), "The plan for equal stages, one line per rank.");
  m.def(
      "normalize_schedule",
      [](const std::string& text) {
        return schedule::to_string(schedule::parse_schedule(text));
      },
      py::arg("text"), "Parses and prints.");
  m.def(
      "executed_actions",
      [](const std::vector<std::string>& order,
         const std::map<int64_t, int64_t>& chunk_of_module) {
        std::vector<schedule::TaskKey> keys;
        for (const std::string& task : order) {
          keys.push_back(schedule::parse_task_key(task));
        }
        return schedule::to_string(
            schedule::executed_actions(keys, chunk_of_module));
      },
      py::arg("order"), py::arg("chunk_of_module"),
      "Tasks of `executed_order` in the text form of a schedule.");
}

}  // namespace smp::bindings
