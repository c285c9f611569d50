#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "csrc/comm/c10d_communicator.h"
#include "csrc/comm/communicator.h"
#include "csrc/comm/mpi_communicator.h"
#include "csrc/common/without_gil.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

void run_without_gil(const std::function<void()>& body) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return body();
  py::gil_scoped_release released;
  body();
}

}  // namespace

using comm::Communicator;
using comm::ReduceOp;
using comm::Work;

void bind_communicator(py::module_& m) {
  set_gil_release(run_without_gil);
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::enum_<ReduceOp>(m, "ReduceOp", "How a collective combines values.")
      .value("SUM", ReduceOp::kSum)
      .value("MAX", ReduceOp::kMax)
      .value("MIN", ReduceOp::kMin);

  py::class_<Work, std::shared_ptr<Work>>(
      m, "Work", "One operation in flight; keeps its tensors alive.")
      .def(
          "wait",
          [](Work& work, double timeout_s) {
            work.wait(std::chrono::milliseconds(
                static_cast<int64_t>(timeout_s * 1000)));
          },
          py::arg("timeout_s"), NoGil(),
          "Blocks until finished; RuntimeError when it failed, was aborted or "
          "timed out.")
      .def("done", &Work::done, NoGil())
      .def_property_readonly("source_rank", &Work::source_rank,
                             "Group rank of the sender, after a recv_any.")
      .def("abort", &Work::abort, NoGil());

  py::class_<Communicator, std::shared_ptr<Communicator>>(
      m, "Communicator",
      "A group of ranks that exchange contiguous tensors; ranks are group "
      "ranks. Every operation returns a Work at once.")
      .def_property_readonly("group_rank", &Communicator::group_rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def("send", &Communicator::send, py::arg("tensor"), py::arg("dst"),
           py::arg("tag") = 0, NoGil())
      .def("recv", &Communicator::recv, py::arg("tensor"), py::arg("src"),
           py::arg("tag") = 0, NoGil())
      .def("recv_any", &Communicator::recv_any, py::arg("tensor"),
           py::arg("tag") = 0, NoGil())
      .def("all_reduce", &Communicator::all_reduce, py::arg("tensor"),
           py::arg("op") = ReduceOp::kSum, NoGil())
      .def("broadcast", &Communicator::broadcast, py::arg("tensor"),
           py::arg("root"), NoGil())
      .def("all_gather", &Communicator::all_gather, py::arg("output"),
           py::arg("input"), NoGil(), "output [size * n], input [n].")
      .def("reduce_scatter", &Communicator::reduce_scatter, py::arg("output"),
           py::arg("input"), py::arg("op") = ReduceOp::kSum, NoGil(),
           "output [n], input [size * n].")
      .def("all_to_all", &Communicator::all_to_all, py::arg("output"),
           py::arg("input"), NoGil(),
           "Both [size * n]: part i of the input goes to group rank i.")
      .def("barrier", &Communicator::barrier, NoGil())
      .def("abort", &Communicator::abort, NoGil(),
           "Ends all waits in this process with an error; further calls "
           "raise.");

  m.def("make_c10d_communicator", &comm::make_c10d_communicator,
        py::arg("backend"), py::arg("name"), NoGil(),
        "Communicator over a torch.distributed Backend, such as "
        "ProcessGroupGloo, that nothing else uses.");
  m.def("mpi_available", &comm::mpi_available,
        "Whether this build has the MPI adapter.");
  m.def("make_mpi_world", &comm::make_mpi_world, NoGil(),
        "Communicator over all processes of the MPI job; starts MPI. "
        "Collective.");
  m.def("make_mpi_group", &comm::make_mpi_group, py::arg("global_ranks"),
        NoGil(), "Communicator over some of them. Collective over these.");
  m.def("mpi_finalize", &comm::mpi_finalize, NoGil(),
        "Ends MPI if smp started it. Collective.");
}

}  // namespace smp::bindings
