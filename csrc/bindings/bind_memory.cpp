#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>

#include "csrc/common/task_scope.h"
#include "csrc/memory/random_state.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

// `with task_scope(step, mb):` for microbatches that run without a server.
class PyTaskScope {
 public:
  explicit PyTaskScope(Task task) : task_(task) {}
  void enter() { scope_.emplace(task_); }
  void exit(const py::args&) { scope_.reset(); }

 private:
  Task task_;
  std::optional<TaskScope> scope_;
};

}  // namespace

void bind_memory(py::module_& m) {
  using memory::RandomState;
  py::class_<RandomState>(m, "RandomState",
                          "A copy of the default random generators.")
      .def_static(
          "capture",
          [](const std::string& device) {
            return RandomState::capture(c10::Device(device));
          },
          py::arg("device"), "Copies the CPU's generator and the device's.")
      .def("restore", &RandomState::restore);
  m.def(
      "seed_generators",
      [](uint64_t seed, const std::string& device) {
        memory::seed_generators(seed, c10::Device(device));
      },
      py::arg("seed"), py::arg("device"),
      "Seeds the default generators of the CPU and of the device.");
  m.def("mix_seed", &memory::mix_seed, py::arg("seed"), py::arg("value"),
        "A seed made of two numbers (splitmix64).");
  py::class_<PyTaskScope>(m, "TaskScope",
                          "Context manager: what the thread works on.")
      .def(py::init([](int64_t step, int mb) {
             return std::make_unique<PyTaskScope>(Task{step, mb});
           }),
           py::arg("step"), py::arg("mb"))
      .def("__enter__", &PyTaskScope::enter)
      .def("__exit__", &PyTaskScope::exit);
}

}  // namespace smp::bindings
