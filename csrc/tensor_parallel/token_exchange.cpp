#include "csrc/tensor_parallel/token_exchange.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/nonzero_static.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>
#include <utility>
#include <vector>

#include "csrc/autograd/once.h"
#include "csrc/common/check.h"
#include "csrc/tensor_parallel/region_call.h"

namespace smp::tensor_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct TokenCall {
  GroupPtr group;
  RoutesPtr routes;
};

int64_t total(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// Returns rows of tokens [tokens, *] on the ranks they are sent to: [rows, *].
at::Tensor to_experts(const TokenCall& call, const at::Tensor& x,
                      const char* what) {
  const Routes& routes = *call.routes;
  SMP_CHECK_VALUE(x.dim() >= 1 && x.size(0) == routes.num_tokens, what,
                  ": expected ", routes.num_tokens,
                  " tokens in dim 0, as the routes have, got shape ",
                  x.sizes());
  if (routes.was_alone) return x;  // all tokens stay, in their order
  return call.group
      ->begin_row_exchange(x.index_select(0, routes.order), routes.sent,
                           routes.received, what)
      .take();
}

// Returns the sum of the rows [rows, *] of each token: [tokens, *]. A token has
// at most one row of a rank, so the order of a sum is that of the ranks, also
// where threads of a device add.
at::Tensor to_tokens(const TokenCall& call, const at::Tensor& y,
                     const char* what) {
  const Routes& routes = *call.routes;
  SMP_CHECK_VALUE(y.dim() >= 1 && y.size(0) == total(routes.received), what,
                  ": expected ", total(routes.received),
                  " rows in dim 0, as the routes have, got shape ", y.sizes());
  if (routes.was_alone) return y;
  const at::Tensor rows =
      call.group->begin_row_exchange(y, routes.received, routes.sent, what)
          .take();
  std::vector<int64_t> shape = y.sizes().vec();
  shape[0] = routes.num_tokens;
  at::Tensor sum = rows.new_zeros(shape);
  int64_t begin = 0;
  for (const int64_t count : routes.sent) {
    if (count > 0) {
      sum.index_add_(0, routes.order.narrow(0, begin, count),
                     rows.narrow(0, begin, count));
    }
    begin += count;
  }
  return sum;
}

struct Dispatch : torch::autograd::Function<Dispatch> {
  static variable_list forward(AutogradContext* context, const TokenCall& call,
                               const at::TensorList tensors) {
    keep(context, call);
    variable_list rows;
    for (const at::Tensor& x : tensors) {
      rows.push_back(to_experts(call, x, "dispatch"));
    }
    variable_list numbers;  // without a gradient
    for (const at::Tensor& x : rows) {
      if (!at::isFloatingType(x.scalar_type())) numbers.push_back(x);
    }
    context->mark_non_differentiable(numbers);
    return rows;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto& call = kept<TokenCall>(context);
    const AloneScope alone(call.routes->was_alone);
    variable_list dx{at::Tensor()};  // gradients of the call
    {
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < grads.size(); ++i) {
        dx.push_back(
            context->needs_input_grad(i)
                ? to_tokens(call, with_data(grads[i]), "backward of dispatch")
                : at::Tensor());
      }
    }
    return autograd::once("dispatch", std::move(dx), grads);
  }
};

struct Combine : torch::autograd::Function<Combine> {
  static at::Tensor forward(AutogradContext* context, const TokenCall& call,
                            const at::Tensor& y) {
    keep(context, call);
    return to_tokens(call, y, "combine");
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto& call = kept<TokenCall>(context);
    const AloneScope alone(call.routes->was_alone);
    at::Tensor dy;
    {
      at::NoGradGuard no_grad;
      dy = to_experts(call, with_data(grads[0]), "backward of combine");
    }
    return autograd::once("combine", {at::Tensor(), std::move(dy)}, grads);
  }
};

// Makes routes as if every rank had the tokens of this one, and each expert
// were here.
RoutesPtr routes_alone(const Group& group, const at::Tensor& experts) {
  const int64_t num_tokens = experts.size(0);
  Sizes to_self(static_cast<size_t>(group.size()), 0);
  to_self[static_cast<size_t>(group.group_rank())] = num_tokens;
  return std::make_shared<Routes>(
      Routes{at::arange(num_tokens, experts.options()), to_self, to_self,
             num_tokens, experts.numel(), group.size() * num_tokens,
             /*was_alone=*/true});
}

}  // namespace

RoutesPtr route(const GroupPtr& group, const at::Tensor& experts,
                const Sizes& sizes) {
  SMP_CHECK_VALUE(experts.dim() == 2 && experts.scalar_type() == at::kLong,
                  "route: expected numbers of experts as int64 [tokens, k], "
                  "got ",
                  experts.scalar_type(), experts.sizes());
  SMP_CHECK_VALUE(static_cast<int>(sizes.size()) == group->size(),
                  "route: expected the numbers of experts of ", group->size(),
                  " ranks, got ", at::IntArrayRef(sizes));
  if (group->is_alone(experts)) return routes_alone(*group, experts);
  const at::NoGradGuard no_grad;
  const int64_t num_ranks = group->size();
  std::vector<int64_t> ends(sizes.size());
  std::partial_sum(sizes.begin(), sizes.end(), ends.begin());
  const at::Tensor ranks =
      at::bucketize(experts, at::tensor(ends, experts.options()),
                    /*out_int32=*/false, /*right=*/true);
  // Experts of a rank that a token has chosen, [ranks + 1, tokens]; the last
  // row counts numbers that no rank has.
  const at::Tensor pairs =
      experts.new_zeros({num_ranks + 1, experts.size(0)})
          .scatter_add_(0, ranks.t(), at::ones_like(experts.t()));
  const at::Tensor hits = pairs.narrow(0, 0, num_ranks).gt(0);
  // The host waits for a device here only.
  const at::Tensor counts =
      at::cat({hits.sum(1), pairs.sum(1), experts.lt(0).sum().reshape({1})})
          .cpu();
  const auto* numbers = counts.const_data_ptr<int64_t>();
  SMP_CHECK_VALUE(
      numbers[2 * num_ranks] == 0 && numbers[2 * num_ranks + 1] == 0,
      "route: expected numbers of experts in [0, ", ends.back(), "), got ",
      numbers[2 * num_ranks] + numbers[2 * num_ranks + 1], " others");
  Sizes sent(numbers, numbers + num_ranks);
  Sizes message;  // to each rank: rows, pairs, tokens
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    message.insert(message.end(),
                   {sent[rank], numbers[num_ranks + rank], experts.size(0)});
  }
  const Header header =
      Header::of("route", experts, {experts.size(1)}).add(sizes);
  const Sizes got = group->exchange_counts(message, header);
  Sizes received;
  int64_t num_pairs = 0;
  int64_t group_tokens = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    received.push_back(got[3 * rank]);
    num_pairs += got[3 * rank + 1];
    group_tokens += got[3 * rank + 2];
  }
  const int64_t num_rows = total(sent);
  at::Tensor order =
      at::nonzero_static(hits, num_rows).select(1, 1).contiguous();
  return std::make_shared<Routes>(
      Routes{std::move(order), std::move(sent), std::move(received),
             experts.size(0), num_pairs, group_tokens, /*was_alone=*/false});
}

std::vector<at::Tensor> dispatch(const GroupPtr& group,
                                 const std::vector<at::Tensor>& tensors,
                                 const RoutesPtr& routes) {
  const AloneScope alone(routes->was_alone);
  return Dispatch::apply(TokenCall{group, routes}, at::TensorList(tensors));
}

at::Tensor combine(const GroupPtr& group, const at::Tensor& y,
                   const RoutesPtr& routes) {
  const AloneScope alone(routes->was_alone);
  return Combine::apply(TokenCall{group, routes}, y);
}

}  // namespace smp::tensor_parallel
