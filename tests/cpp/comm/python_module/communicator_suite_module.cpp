#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "tests/cpp/comm/communicator_suite.h"

namespace py = pybind11;
using smp::comm::Communicator;

// Import smp._C first: it defines the Python type of Communicator.
PYBIND11_MODULE(smp_communicator_suite, m) {
  namespace suite = smp::comm::suite;
  m.def("check_names", [] {
    py::list names;
    for (const suite::Check& one : suite::all_checks()) names.append(one.name);
    return names;
  });
  m.def(
      "run_check",
      [](const std::shared_ptr<Communicator>& comm, const std::string& name) {
        for (const suite::Check& one : suite::all_checks()) {
          if (one.name == name) return one.check(*comm);
        }
        throw std::invalid_argument("no check is named " + name);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "check_abort_ends_waits",
      [](const std::shared_ptr<Communicator>& comm, bool with_collective) {
        suite::check_abort_ends_waits(*comm, with_collective);
      },
      py::call_guard<py::gil_scoped_release>());
}
