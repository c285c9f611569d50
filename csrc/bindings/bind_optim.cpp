#include <torch/csrc/utils/pybind.h>

#include "csrc/optim/clip.h"

namespace py = pybind11;

namespace smp::bindings {

void bind_optim(py::module_& m) {
  m.def("clip_coefficient", &optim::clip_coefficient, py::arg("total_norm"),
        py::arg("max_norm"),
        "min(1, max_norm / (total_norm + 1e-6)); NaN for a NaN norm.");
}

}  // namespace smp::bindings
