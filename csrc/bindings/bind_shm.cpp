#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "csrc/bindings/waits.h"
#include "csrc/comm/communicator.h"
#include "csrc/health/fault_board.h"
#include "csrc/shm/shared_collectives.h"
#include "csrc/shm/shared_memory.h"

namespace py = pybind11;

namespace smp::bindings {

using shm::SharedMemory;

namespace {

shm::SharedMemoryPtr connect_shared_memory(const comm::CommunicatorPtr& world,
                                           const FaultsPtr& board,
                                           std::string machine, bool enabled,
                                           int64_t ring_bytes,
                                           double timeout_s) {
  return shm::connect_shared_memory(*world, *board,
                                    {.enabled = enabled,
                                     .ring_bytes = ring_bytes,
                                     .machine = std::move(machine),
                                     .timeout = to_ms(timeout_s)});
}

}  // namespace

void bind_shm(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(
      m, "SharedMemory", "Memory shared with other ranks of this host.")
      .def_property_readonly("peers", &SharedMemory::peers,
                             "Global ranks that it is shared with.");
  m.def("connect_shared_memory", &connect_shared_memory, NoGil(),
        py::arg("world"), py::arg("board"), py::kw_only(), py::arg("machine"),
        py::arg("enabled") = true, py::arg("ring_bytes") = 8 << 20,
        py::arg("timeout_s") = 1800.0,
        "Collective: finds the ranks that can share memory.");
  m.def(
      "share_collectives",
      [](comm::CommunicatorPtr inner, std::string machine, bool enabled,
         FaultsPtr faults, std::vector<int> ranks, double timeout_s) {
        return shm::share_collectives(
            std::move(inner), {enabled, std::move(machine)},
            make_wait_options(timeout_s, std::move(faults), std::move(ranks)));
      },
      py::arg("inner"), py::kw_only(), py::arg("machine"), py::arg("enabled"),
      py::arg("faults") = py::none(), py::arg("ranks") = std::vector<int>(),
      py::arg("timeout_s") = 1800.0, NoGil(),
      "Collectives through memory that all ranks of `inner` map, or `inner` "
      "itself where they cannot. Collective.");
}

}  // namespace smp::bindings
