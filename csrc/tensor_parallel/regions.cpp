#include "csrc/tensor_parallel/regions.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "csrc/autograd/once.h"
#include "csrc/common/check.h"
#include "csrc/tensor_parallel/region_call.h"

namespace smp::tensor_parallel {
namespace {

using comm::ReduceOp;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum class Kind { kCopy, kReduce, kGather, kReduceScatter, kScatter };

// A region along one dim. Forward decided which ranks communicate.
struct RegionCall {
  GroupPtr group;
  Kind kind;
  int64_t dim = 0;
  Sizes sizes = {};
  GatheredGrad grad = GatheredGrad::kSum;
  bool was_alone = alone();
};

at::Tensor run_forward(const RegionCall& call, const at::Tensor& x) {
  Group& group = *call.group;
  switch (call.kind) {
    case Kind::kCopy:
      return x;
    case Kind::kReduce:
      return group.begin_all_reduce(x, ReduceOp::kSum, "reduce").take();
    case Kind::kGather:
      return group.begin_all_gather(x, call.dim, call.sizes, "gather").take();
    case Kind::kReduceScatter:
      return group
          .begin_reduce_scatter(x, call.dim, call.sizes, "reduce_scatter")
          .take();
    case Kind::kScatter:
      return group.own_part(x, call.dim, call.sizes, "scatter").contiguous();
  }
  SMP_ASSERT(false, "region ", static_cast<int>(call.kind));
}

at::Tensor run_backward(const RegionCall& call, const at::Tensor& g) {
  Group& group = *call.group;
  switch (call.kind) {
    case Kind::kCopy:
      return group.begin_all_reduce(g, ReduceOp::kSum, "backward of copy")
          .take();
    case Kind::kReduce:
      return g;
    case Kind::kGather:
      if (call.grad == GatheredGrad::kOwn) {
        return group.own_part(g, call.dim, call.sizes, "backward of gather")
            .contiguous();
      }
      return group
          .begin_reduce_scatter(g, call.dim, call.sizes, "backward of gather")
          .take();
    case Kind::kReduceScatter:
      return group
          .begin_all_gather(g, call.dim, call.sizes,
                            "backward of reduce_scatter")
          .take();
    case Kind::kScatter:
      return group
          .begin_all_gather(g, call.dim, call.sizes, "backward of scatter")
          .take();
  }
  SMP_ASSERT(false, "region ", static_cast<int>(call.kind));
}

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"copy", "reduce", "gather",
                                    "reduce_scatter", "scatter"};
  return kNames[static_cast<int>(kind)];
}

struct Region : torch::autograd::Function<Region> {
  static at::Tensor forward(AutogradContext* context, const RegionCall& call,
                            const at::Tensor& x) {
    keep(context, call);
    return run_forward(call, x);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const RegionCall& call = kept<RegionCall>(context);
    const AloneScope alone(call.was_alone);
    at::Tensor dx;
    {
      at::NoGradGuard no_grad;
      dx = run_backward(call, with_data(grads[0]));
    }
    return autograd::once(name_of(call.kind), {at::Tensor(), std::move(dx)},
                          grads);
  }
};

struct ExchangeCall {
  GroupPtr group;
  int64_t split_dim;
  int64_t concat_dim;
  Sizes split_sizes;
  Sizes concat_sizes;
  bool was_alone = alone();
};

struct Exchange : torch::autograd::Function<Exchange> {
  static at::Tensor forward(AutogradContext* context, const ExchangeCall& call,
                            const at::Tensor& x) {
    keep(context, call);
    return call.group
        ->begin_exchange(x, call.split_dim, call.concat_dim, call.split_sizes,
                         call.concat_sizes, "exchange")
        .take();
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto& call = kept<ExchangeCall>(context);
    const AloneScope alone(call.was_alone);
    at::Tensor dx;
    {
      at::NoGradGuard no_grad;
      dx = call.group
               ->begin_exchange(with_data(grads[0]), call.concat_dim,
                                call.split_dim, call.concat_sizes,
                                call.split_sizes, "backward of exchange")
               .take();
    }
    return autograd::once("exchange", {at::Tensor(), std::move(dx)}, grads);
  }
};

at::Tensor apply(RegionCall call, const at::Tensor& x) {
  if (call.group->size() == 1) return x;
  return Region::apply(call, x);
}

}  // namespace

at::Tensor copy(const GroupPtr& group, const at::Tensor& x) {
  return apply({group, Kind::kCopy}, x);
}

at::Tensor reduce(const GroupPtr& group, const at::Tensor& x) {
  return apply({group, Kind::kReduce}, x);
}

at::Tensor gather(const GroupPtr& group, const at::Tensor& x, int64_t dim,
                  const Sizes& sizes, GatheredGrad grad) {
  return apply({group, Kind::kGather, dim, sizes, grad}, x);
}

at::Tensor reduce_scatter(const GroupPtr& group, const at::Tensor& x,
                          int64_t dim, const Sizes& sizes) {
  return apply({group, Kind::kReduceScatter, dim, sizes}, x);
}

at::Tensor scatter(const GroupPtr& group, const at::Tensor& x, int64_t dim,
                   const Sizes& sizes) {
  return apply({group, Kind::kScatter, dim, sizes}, x);
}

at::Tensor exchange(const GroupPtr& group, const at::Tensor& x,
                    int64_t split_dim, int64_t concat_dim,
                    const Sizes& split_sizes, const Sizes& concat_sizes) {
  if (group->size() == 1) return x;
  return Exchange::apply(
      ExchangeCall{group, split_dim, concat_dim, split_sizes, concat_sizes}, x);
}

}  // namespace smp::tensor_parallel
