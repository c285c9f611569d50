#include <torch/csrc/utils/pybind.h>

#include "csrc/common/check.h"

namespace py = pybind11;

namespace smp::bindings {

void bind_common(py::module_& m) {
  m.def("rank_prefix", &rank_prefix,
        "Text in front of every error and log line of this process.");
  m.def("set_rank_prefix", &set_rank_prefix, py::arg("prefix"),
        "Sets `rank_prefix`, for instance \"[global_rank 5 | pp 1] \".");
}

}  // namespace smp::bindings
