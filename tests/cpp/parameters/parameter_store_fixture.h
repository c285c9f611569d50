#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/parameters/parameter_scope.h"
#include "csrc/parameters/parameter_store.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/comm/stream_group.h"

namespace smp::parameters {

/// Parameters p0, p1, ... of `shapes` that one rank of `group` has its part of.
/// Parameter i has the values 1000 i + 0, 1, 2, ...
struct Sharded {
  using Shapes = std::vector<std::vector<int64_t>>;
  using Units = std::vector<std::vector<int>>;

  static ParameterStore::Options patient() {
    ParameterStore::Options options;
    options.wait.timeout = std::chrono::seconds(20);
    return options;
  }

  Sharded(const Shapes& shapes, const Units& units, GatherGroupPtr group,
          ParameterStore::Options options = patient(),
          c10::ScalarType dtype = c10::ScalarType::Double) {
    const at::TensorOptions kind = at::TensorOptions().dtype(dtype);
    for (size_t i = 0; i < shapes.size(); ++i) {
      int64_t numel = 1;
      for (const int64_t size : shapes[i]) numel *= size;
      values.push_back(at::arange(numel, kind)
                           .add_(1000. * static_cast<double>(i))
                           .view(shapes[i]));
      const int64_t part = (numel + group->size() - 1) / group->size();
      shards.push_back(at::zeros({part}, kind));
      const int64_t begin = std::min(part * group->group_rank(), numel);
      const int64_t held = std::min(part, numel - begin);
      shards[i]
          .narrow(0, 0, held)
          .copy_(values[i].view(-1).narrow(0, begin, held));
      params.push_back(
          at::full({}, std::numeric_limits<double>::quiet_NaN(), kind)
              .expand(shapes[i])
              .requires_grad_());
    }
    std::vector<std::string> names;
    for (size_t i = 0; i < units.size(); ++i) {
      names.push_back("unit " + std::to_string(i));
    }
    store = std::make_shared<ParameterStore>(
        params, shards, units, names, std::move(group), std::move(options));
    uses = std::make_shared<BackwardUses>(store);
  }

  bool is_whole(int i) const {
    return params[i].detach().equal(values[i]) && has_memory(i);
  }
  bool has_memory(int i) const { return params[i].is_contiguous(); }

  std::vector<at::Tensor> values;
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> shards;
  ParameterStorePtr store;
  std::shared_ptr<BackwardUses> uses;
};

}  // namespace smp::parameters
