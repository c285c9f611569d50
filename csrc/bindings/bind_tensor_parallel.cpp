#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "csrc/bindings/waits.h"
#include "csrc/health/fault_board.h"
#include "csrc/tensor_parallel/fp8_linear.h"
#include "csrc/tensor_parallel/layer_name.h"
#include "csrc/tensor_parallel/regions.h"
#include "csrc/tensor_parallel/seeds.h"
#include "csrc/tensor_parallel/token_exchange.h"
#include "csrc/tensor_parallel/vocabulary.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

using tensor_parallel::Group;
using tensor_parallel::GroupPtr;
using tensor_parallel::Pending;
using tensor_parallel::Sizes;

GroupPtr make_group(std::optional<comm::CommunicatorPtr> communicator,
                    int group_rank, int size, comm::CommunicatorPtr control,
                    FaultsPtr faults, std::vector<int> ranks,
                    double timeout_s) {
  comm::WaitOptions wait =
      make_wait_options(timeout_s, std::move(faults), std::move(ranks));
  wait.hint =
      "did every rank of the tensor-parallel group run the same modules, and "
      "backward equally often?";
  return std::make_shared<Group>(communicator.value_or(nullptr),
                                 std::move(control), group_rank, size,
                                 std::move(wait));
}

std::vector<at::Tensor> gathered_linears(
    const GroupPtr& group, const at::Tensor& x,
    const std::vector<at::Tensor>& weights,
    const std::vector<std::optional<at::Tensor>>& biases,
    std::optional<int64_t> dim, const Sizes& sizes,
    const std::optional<std::string>& fp8) {
  std::vector<at::Tensor> given;
  given.reserve(biases.size());
  for (const auto& bias : biases) given.push_back(bias.value_or(at::Tensor()));
  return tensor_parallel::gathered_linears(group, x, weights, given, dim, sizes,
                                           fp8);
}

at::Tensor fp8_linear(const GroupPtr& group, const at::Tensor& x,
                      const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::string& scaling, bool splits_in) {
  return tensor_parallel::fp8_linear(
      group, x, weight, bias, scaling,
      splits_in ? nn::SplitFeatures::kIn : nn::SplitFeatures::kOut);
}

at::Tensor cross_entropy(const GroupPtr& group, const at::Tensor& logits,
                         const at::Tensor& targets, int64_t begin,
                         int64_t vocab_size, int64_t ignore_index,
                         double label_smoothing) {
  return tensor_parallel::vocabulary_cross_entropy(
      group, logits, targets,
      {begin, vocab_size, ignore_index, label_smoothing});
}

at::Tensor gather(const GroupPtr& group, const at::Tensor& x, int64_t dim,
                  const Sizes& sizes, bool sum_grads) {
  return tensor_parallel::gather(group, x, dim, sizes,
                                 sum_grads
                                     ? tensor_parallel::GatheredGrad::kSum
                                     : tensor_parallel::GatheredGrad::kOwn);
}

py::tuple traffic(const Group& group) {
  const tensor_parallel::Traffic traffic = group.traffic();
  return py::make_tuple(traffic.num_calls, traffic.bytes_sent);
}

Pending begin_row_exchange(Group& group, const at::Tensor& x, const Sizes& sent,
                           const Sizes& received, const std::string& what) {
  return group.begin_row_exchange(x, sent, received, what.c_str());
}

void bind_routes(py::module_& m) {
  using tensor_parallel::Routes;
  // The object is never written to; pybind11 holds no pointers to const.
  py::class_<Routes, std::shared_ptr<Routes>>(
      m, "TokenRoutes",
      "Which tokens go to which ranks; see tensor_parallel/token_exchange.h.")
      .def_readonly("sent", &Routes::sent)
      .def_readonly("received", &Routes::received)
      .def_readonly("num_pairs", &Routes::num_pairs)
      .def_readonly("group_tokens", &Routes::group_tokens)
      .def_readonly("was_alone", &Routes::was_alone);
}

}  // namespace

void bind_tensor_parallel(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  namespace tp = tensor_parallel;
  const Sizes even;
  bind_routes(m);
  py::class_<Pending>(
      m, "PendingTensor",
      "The result of a collective, which may be on its way; see "
      "tensor_parallel/group.h.")
      .def("take", &Pending::take, NoGil(),
           "Waits, or makes the current stream wait; once.");
  py::class_<Group, GroupPtr>(
      m, "TensorParallelGroup",
      "Ranks that split layers, and the regions of autograd at the borders; "
      "see tensor_parallel/{group,regions,vocabulary}.h. `sizes` are the parts "
      "of the ranks along a dim; empty: equal ones.")
      .def(py::init(&make_group), py::arg("communicator"),
           py::arg("group_rank"), py::arg("size"), py::kw_only(),
           py::arg("control") = py::none(), py::arg("faults") = py::none(),
           py::arg("ranks") = std::vector<int>(), py::arg("timeout_s") = 1800.0)
      .def_property_readonly("group_rank", &Group::group_rank)
      .def_property_readonly("size", &Group::size)
      .def("traffic", &traffic,
           "(collectives, bytes that this rank had to send) so far.")
      .def("copy", &tp::copy, py::arg("x"), NoGil())
      .def("reduce", &tp::reduce, py::arg("x"), NoGil())
      .def("gather", &gather, py::arg("x"), py::arg("dim"),
           py::arg("sizes") = even, py::arg("sum_grads") = true, NoGil())
      .def("reduce_scatter", &tp::reduce_scatter, py::arg("x"), py::arg("dim"),
           py::arg("sizes") = even, NoGil())
      .def("scatter", &tp::scatter, py::arg("x"), py::arg("dim"),
           py::arg("sizes") = even, NoGil())
      .def("exchange", &tp::exchange, py::arg("x"), py::arg("split_dim"),
           py::arg("concat_dim"), py::arg("split_sizes") = even,
           py::arg("concat_sizes") = even, NoGil())
      .def("begin_row_exchange", &begin_row_exchange, py::arg("x"),
           py::arg("sent"), py::arg("received"), py::arg("what"), NoGil(),
           py::keep_alive<0, 1>(), "Collective; not seen by autograd.")
      .def("route", &tp::route, py::arg("experts"), py::arg("sizes"), NoGil(),
           "Collective; waits for the numbers of a device.")
      .def("dispatch", &tp::dispatch, py::arg("tensors"), py::arg("routes"),
           NoGil())
      .def("combine", &tp::combine, py::arg("y"), py::arg("routes"), NoGil())
      .def("gathered_linears", &gathered_linears, py::arg("x"),
           py::arg("weights"), py::arg("biases"), py::arg("dim"),
           py::arg("sizes") = even, py::arg("fp8") = py::none(), NoGil())
      .def("fp8_linear", &fp8_linear, py::arg("x"), py::arg("weight"),
           py::arg("bias"), py::arg("scaling"), py::kw_only(),
           py::arg("splits_in"), NoGil(),
           "A linear layer of which ranks have parts; see fp8_linear.h.")
      .def("summed_linear", &tp::summed_linear, py::arg("x"), py::arg("weight"),
           py::arg("other") = py::none(), NoGil())
      .def("num_pieces", &Group::num_pieces, py::arg("part"), py::arg("extent"))
      .def("vocabulary_cross_entropy", &cross_entropy, py::arg("logits"),
           py::arg("targets"), py::kw_only(), py::arg("begin"),
           py::arg("vocab_size"), py::arg("ignore_index") = -100,
           py::arg("label_smoothing") = 0.0, NoGil())
      .def("own_seed", &tp::own_seed, NoGil())
      .def("common_seed", &tp::common_seed, NoGil(), "Collective.")
      .def("seed_of_first", &tp::seed_of_first, py::arg("seed"), NoGil(),
           "Collective.")
      .def("all_say", &Group::all_say, py::arg("says"), py::arg("what"),
           NoGil(), "Collective; only hosts talk.");
  m.def("vocabulary_embedding", &tp::vocabulary_embedding, py::arg("ids"),
        py::arg("table"), py::arg("begin"), py::arg("padding_id") = -1,
        NoGil());
  m.def("exchange_layer_name", &tp::exchange_layer_name, py::arg("name"),
        "Names the layer that this thread runs, which has to be one on all "
        "ranks of a tensor-parallel group. Returns the name before.");
  m.def("set_tensor_parallel_alone", &tp::set_alone, py::arg("is_alone"),
        "Makes the regions of this thread communicate with nobody. Returns the "
        "value before.");
}

}  // namespace smp::bindings
