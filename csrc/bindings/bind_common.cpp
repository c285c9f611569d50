#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "csrc/common/check.h"
#include "csrc/common/log.h"
#include "csrc/common/microbatch_listener.h"

namespace py = pybind11;

namespace smp::bindings {

void bind_common(py::module_& m) {
  m.def("rank_prefix", &rank_prefix,
        "Text in front of every error and log line of this process.");
  m.def("set_details_file", &set_details_file, py::arg("path"),
        "Names the file that takes what is too long for a terminal, such as "
        "stacks; empty: the terminal gets it.");
  m.def("set_rank_prefix", &set_rank_prefix, py::arg("prefix"),
        "Sets `rank_prefix`, for instance \"[global_rank 5 | pp 1] \".");
  py::class_<MicrobatchListener, std::shared_ptr<MicrobatchListener>>(
      m, "MicrobatchListener", "Hears of the end of microbatches.");
}

}  // namespace smp::bindings
