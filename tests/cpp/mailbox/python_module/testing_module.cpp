#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/memory/host_allocator.h"
#include "tests/cpp/comm/communicator_suite.h"
#include "tests/cpp/comm/stream_group.h"
#include "tests/cpp/mailbox/test_delays.h"

namespace py = pybind11;
using smp::comm::Communicator;

namespace {

std::shared_ptr<smp::comm::IssueLog> log_of_process() {
  static const auto log = std::make_shared<smp::comm::IssueLog>();
  return log;
}

// Groups of the host that look like those of a device; see stream_group.h.
void bind_stream_groups(py::module_& m) {
  m.def("stream_group",
        [](std::shared_ptr<Communicator> inner,
           std::string name) -> std::shared_ptr<Communicator> {
          return std::make_shared<smp::comm::StreamGroup>(
              std::move(inner), log_of_process(), std::move(name));
        });
  m.def("issued", [] {
    const std::lock_guard lock(log_of_process()->mutex);
    return log_of_process()->issued;
  });
  m.def("forget_issued", [] {
    const std::lock_guard lock(log_of_process()->mutex);
    log_of_process()->issued.clear();
  });
  m.def("allow_waits",
        [](bool allows) { log_of_process()->allows_waits = allows; });
}

void bind_substitutes(py::module_& m) {
  m.def("set_delays", &smp::mailbox::TestDelays::set, py::arg("seed"),
        py::arg("max_us"),
        "Random pauses in the transport of this process; 0 ends them.");
  m.def(
      "limit_host_memory",
      [](int64_t num_bytes) {
        smp::memory::HostAllocator::instance().set_limit(num_bytes);
      },
      py::arg("num_bytes"),
      "Large CPU tensors find no memory beyond so much; 0: no limit.");
}

void bind_suite(py::module_& m) {
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

}  // namespace

// Import smp._C first: it defines the Python type of Communicator. With this
// module mailboxes have the lanes and the delays that SMP_TEST_LANES and
// SMP_TEST_DELAYS ask for (substitutes_of_tests.cpp).
PYBIND11_MODULE(smp_testing, m) {
  bind_stream_groups(m);
  bind_substitutes(m);
  bind_suite(m);
}
