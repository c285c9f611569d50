#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "csrc/bindings/waits.h"
#include "csrc/bindings/without_gil.h"
#include "csrc/gradients/reducer.h"
#include "csrc/gradients/shard_layout.h"
#include "csrc/health/fault_board.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

using comm::CommunicatorPtr;
using gradients::ParameterRecord;
using gradients::Reducer;
using gradients::ReductionGroup;
using gradients::Segment;
using gradients::ShardedBucket;
using gradients::ShardHolding;
using gradients::Sharding;
using gradients::ShardLayout;

using MaybeTensor = std::optional<at::Tensor>;

ParameterRecord make_record(int index, std::string name,
                            std::vector<int64_t> shape, at::ScalarType dtype,
                            double divisor,
                            std::optional<topology::ShardInterval> interval,
                            std::vector<std::string> ties, ReductionGroup group,
                            std::optional<at::ScalarType> accumulation_dtype) {
  ParameterRecord record = gradients::whole_record(
      index, std::move(name), std::move(shape), dtype, divisor);
  if (interval) record.interval = *interval;
  record.ties = std::move(ties);
  record.group = group;
  if (accumulation_dtype) record.accumulation_dtype = *accumulation_dtype;
  return record;
}

std::shared_ptr<Reducer> make_reducer(
    std::vector<at::Tensor> params, std::vector<ParameterRecord> records,
    std::optional<CommunicatorPtr> dp,
    std::optional<std::vector<MaybeTensor>> targets,
    std::optional<Sharding> sharding, std::optional<py::function> apply,
    CommunicatorPtr control, FaultsPtr faults, std::vector<int> dp_ranks,
    int64_t bucket_cap_bytes, bool overlap, bool average_over_microbatches,
    double num_batches, int passes_per_reduction,
    bool expects_one_per_microbatch, double timeout_s) {
  Reducer::Options options;
  options.bucket_cap_bytes = bucket_cap_bytes;
  options.overlap = overlap;
  options.average_over_microbatches = average_over_microbatches;
  options.num_batches = num_batches;
  options.expects_one_per_microbatch = expects_one_per_microbatch;
  options.passes_per_reduction = passes_per_reduction;
  options.sharding = std::move(sharding);
  if (apply) {
    options.apply =
        without_gil<void, int>(std::move(*apply), "update in a backward");
  }
  options.control = std::move(control);
  options.wait =
      make_wait_options(timeout_s, std::move(faults), std::move(dp_ranks));
  const py::gil_scoped_release gil;
  std::vector<at::Tensor> masters = params;
  if (targets) {
    masters.clear();
    for (const auto& target : *targets) {
      masters.push_back(target.value_or(at::Tensor()));
    }
  }
  return std::make_shared<Reducer>(std::move(params), std::move(masters),
                                   std::move(records), dp.value_or(nullptr),
                                   std::move(options));
}

void bind_record(py::module_& m) {
  py::enum_<ReductionGroup>(m, "ReductionGroup",
                            "Over which ranks a gradient is summed.")
      .value("DP", ReductionGroup::kDp)
      .value("RDP", ReductionGroup::kRdp);
  py::class_<ParameterRecord>(m, "ParameterRecord",
                              "What all parts of the library know about a "
                              "parameter that this rank holds.")
      .def(py::init(&make_record), py::arg("index"), py::arg("name"),
           py::arg("shape"), py::arg("dtype"), py::kw_only(),
           py::arg("divisor") = 1.0, py::arg("interval") = py::none(),
           py::arg("ties") = std::vector<std::string>(),
           py::arg("group") = ReductionGroup::kDp,
           py::arg("accumulation_dtype") = py::none())
      .def_readonly("index", &ParameterRecord::index)
      .def_readonly("name", &ParameterRecord::name)
      .def_readonly("shape", &ParameterRecord::shape)
      .def_readonly("dtype", &ParameterRecord::dtype)
      .def_readonly("accumulation_dtype", &ParameterRecord::accumulation_dtype)
      .def_readonly("divisor", &ParameterRecord::divisor)
      .def_readonly("interval", &ParameterRecord::interval)
      .def_readonly("ties", &ParameterRecord::ties)
      .def_readonly("group", &ParameterRecord::group)
      .def_property_readonly("local_shape", &ParameterRecord::local_shape)
      .def("__repr__", &ParameterRecord::describe);
}

void bind_shards(py::module_& m) {
  py::enum_<ShardLayout>(m, "ShardLayout",
                         "How a bucket is divided over a shard group.")
      .value("EQUAL_CUT", ShardLayout::kEqualCut)
      .value("PER_PARAMETER", ShardLayout::kPerParameter);
  py::class_<Segment>(m, "ShardSegment",
                      "Elements [begin, begin + numel) of a parameter lie at "
                      "flat_offset of the flat bucket.")
      .def_readonly("record_idx", &Segment::record_idx)
      .def_readonly("flat_offset", &Segment::flat_offset)
      .def_readonly("begin", &Segment::begin)
      .def_readonly("numel", &Segment::numel);
  py::class_<ShardHolding>(m, "ShardHolding",
                           "What one rank holds of a parameter, and where in "
                           "its shard.")
      .def_readonly("record_idx", &ShardHolding::record_idx)
      .def_readonly("begin", &ShardHolding::begin)
      .def_readonly("numel", &ShardHolding::numel)
      .def_readonly("offset", &ShardHolding::offset)
      .def_readonly("room", &ShardHolding::room);
  py::class_<ShardedBucket>(m, "ShardedBucket",
                            "A bucket of num_shards * shard_numel elements; "
                            "see gradients/shard_layout.h.")
      .def_readonly("dtype", &ShardedBucket::dtype)
      .def_readonly("accumulation_dtype", &ShardedBucket::accumulation_dtype)
      .def_readonly("num_shards", &ShardedBucket::num_shards)
      .def_readonly("shard_numel", &ShardedBucket::shard_numel)
      .def_readonly("segments", &ShardedBucket::segments)
      .def_readonly("holdings", &ShardedBucket::holdings);
  m.def("plan_shards", &gradients::plan_shards, py::arg("records"),
        py::arg("bucket_cap_bytes"), py::arg("num_shards"), py::arg("layout"),
        "Buckets of the records, divided over a shard group.");
}

void bind_reducer(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<Reducer::Stats>(m, "ReducerStats")
      .def_readonly("num_reductions", &Reducer::Stats::num_reductions)
      .def_readonly("num_early_buckets", &Reducer::Stats::num_early_buckets)
      .def_readonly("num_late_parameters", &Reducer::Stats::num_late_parameters)
      .def_readonly("flat_bytes", &Reducer::Stats::flat_bytes)
      .def_readonly("peak_flat_bytes", &Reducer::Stats::peak_flat_bytes);
  py::class_<Sharding>(m, "Sharding",
                       "How gradients are reduced where each rank keeps a "
                       "shard; see gradients/shard_reduction.h.")
      .def(py::init([](ShardLayout layout, CommunicatorPtr shard,
                       std::vector<CommunicatorPtr> further,
                       bool every_microbatch) {
             return Sharding{layout, std::move(shard), std::move(further),
                             every_microbatch};
           }),
           py::arg("layout"), py::arg("shard"), py::kw_only(),
           py::arg("further") = std::vector<CommunicatorPtr>(),
           py::arg("every_microbatch") = false);
  py::class_<Reducer, MicrobatchListener, std::shared_ptr<Reducer>>(
      m, "Reducer",
      "Collects gradients in microbatch order and averages them over the "
      "data-parallel ranks; see gradients/reducer.h.")
      .def(
          py::init(&make_reducer), py::arg("params"), py::arg("records"),
          py::arg("dp"), py::kw_only(), py::arg("targets") = py::none(),
          py::arg("sharding") = py::none(), py::arg("apply") = py::none(),
          py::arg("control") = py::none(), py::arg("faults") = py::none(),
          py::arg("dp_ranks") = std::vector<int>(),
          py::arg("bucket_cap_bytes") = int64_t{25} << 20,
          py::arg("overlap") = true,
          py::arg("average_over_microbatches") = true,
          py::arg("num_batches") = 1.0, py::arg("passes_per_reduction") = 1,
          py::arg("expects_one_per_microbatch") = true,
          py::arg("timeout_s") = 1800.0,
          "Collective over `dp`, which may be None. `control` has the same "
          "ranks and serves tensors of the host; needed where `dp` does not. "
          "`apply` gets the index of each bucket as soon as it was summed, and "
          "uses up `.grad` of its targets.")
      .def("begin_step", &Reducer::begin_step, release_gil(),
           py::arg("num_microbatches"), py::arg("may_overlap") = true,
           py::arg("are_shares") = false)
      .def("finish_microbatch", &Reducer::finish_microbatch, release_gil(),
           py::arg("mb"), "The backward of `mb` is over on this rank.")
      .def("end_step", &Reducer::end_step, release_gil(),
           "Reduces the rest and sets `.grad`. Collective over `dp`.")
      .def("cancel_step", &Reducer::cancel_step, release_gil(),
           "Closes a step that failed or had no backward; not collective.")
      .def_property_readonly("in_step",
                             py::cpp_function(&Reducer::in_step, release_gil()))
      .def_property_readonly("stats",
                             py::cpp_function(&Reducer::stats, release_gil()))
      .def_property_readonly("records", &Reducer::records)
      .def_property_readonly(
          "num_buckets",
          [](const Reducer& reducer) { return reducer.plan().buckets.size(); })
      .def(
          "flat", &Reducer::flat, py::arg("bucket_idx"),
          "Flat gradient tensor of a bucket, or this rank's shard of it; valid "
          "between steps.");
}

}  // namespace

void bind_gradients(py::module_& m) {
  bind_record(m);
  bind_shards(m);
  bind_reducer(m);
}

}  // namespace smp::bindings
