#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "csrc/bindings/without_gil.h"
#include "csrc/gradients/hooked_group.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

using comm::CommunicatorPtr;
using gradients::HookedGroup;
using gradients::PromisedWork;

c10d::GradBucket make_grad_bucket(int64_t index, int64_t count, at::Tensor flat,
                                  const std::vector<int64_t>& offsets,
                                  std::vector<at::Tensor> params) {
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;  // of tensors that the bucket keeps
  for (const at::Tensor& param : params) {
    lengths.push_back(param.numel());
    sizes.push_back(param.sizes());
  }
  if (params.empty()) {
    lengths.push_back(flat.numel());
    sizes.push_back(flat.sizes());
  }
  return c10d::GradBucket(index, count, std::move(flat),
                          {offsets.begin(), offsets.end()}, std::move(lengths),
                          std::move(sizes), std::move(params), std::nullopt);
}

}  // namespace

void bind_comm_hook(py::module_& m) {
  py::class_<PromisedWork, comm::Work, std::shared_ptr<PromisedWork>>(
      m, "PromisedWork", "An operation that somebody else carries out.")
      .def(py::init([](py::function finish) {
             return std::make_shared<PromisedWork>(
                 without_gil<void>(std::move(finish), "communication hook"));
           }),
           py::arg("finish"))
      .def("complete", &PromisedWork::complete,
           py::call_guard<py::gil_scoped_release>());
  py::class_<HookedGroup, comm::Communicator, std::shared_ptr<HookedGroup>>(
      m, "HookedGroup",
      "A group in which somebody else sums buckets of gradients; see "
      "gradients/hooked_group.h.")
      .def(py::init([](CommunicatorPtr group, py::function hook) {
             return std::make_shared<HookedGroup>(
                 std::move(group),
                 without_gil<comm::WorkPtr, int, const at::Tensor&>(
                     std::move(hook), "communication hook"));
           }),
           py::arg("group"), py::arg("hook"))
      .def("set_buckets", &HookedGroup::set_buckets, py::arg("flats"));
  m.def(
      "make_grad_bucket", &make_grad_bucket, py::arg("index"), py::arg("count"),
      py::arg("flat"), py::arg("offsets"), py::arg("params"),
      "A torch.distributed.GradBucket; without parameters it is one gradient.");
}

}  // namespace smp::bindings
