#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/checkpoint/slice_plan.h"

namespace py = pybind11;

namespace smp::bindings {

using checkpoint::SliceRead;

void bind_checkpoint(py::module_& m) {
  py::class_<SliceRead>(
      m, "SliceRead",
      "num_runs copies of run_length elements out of one stored slice.")
      .def_readonly("source_idx", &SliceRead::source_idx)
      .def_readonly("src_offset", &SliceRead::src_offset)
      .def_readonly("dst_offset", &SliceRead::dst_offset)
      .def_readonly("run_length", &SliceRead::run_length)
      .def_readonly("num_runs", &SliceRead::num_runs)
      .def_readonly("src_stride", &SliceRead::src_stride)
      .def_readonly("dst_stride", &SliceRead::dst_stride);
  m.def("plan_slice_reads", &checkpoint::plan_slice_reads, py::arg("shape"),
        py::arg("stored"), py::arg("wanted"),
        py::call_guard<py::gil_scoped_release>(),
        "The reads that make up a slice of a tensor from stored slices.");
}

}  // namespace smp::bindings
