#include "csrc/gradients/microbatch_order.h"

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"

namespace smp::gradients {

void MicrobatchOrder::begin(int num_microbatches, std::vector<int> counts) {
  cursor_ = 0;
  finished_.assign(num_microbatches, false);
  params_.assign(counts.size(), {});
  for (size_t i = 0; i < counts.size(); ++i) {
    params_[i].count = counts[i];
    params_[i].num_given.assign(num_microbatches, 0);
  }
}

void MicrobatchOrder::add(int param_idx, int mb, const at::Tensor& grad) {
  if (mb == -1) mb = cursor_;
  SMP_CHECK(mb >= 0 && mb < num_microbatches(),
            "a gradient came for microbatch ", mb, ", but the step has ",
            num_microbatches());
  SMP_CHECK(!finished_[mb], "a gradient came for microbatch ", mb,
            ", whose backward is over; call backward on the thread that runs "
            "the step function");
  Parameter& param = params_.at(param_idx);
  const bool passes = mb <= next_of(param);
  // Timing decides whether gradients of later microbatches have passed by now,
  // so it must not decide on the place of this gradient.
  const bool is_surplus = param.count > 0 && param.num_given[mb] >= param.count;
  ++param.num_given[mb];
  if (is_surplus) {
    param.surplus[mb].push_back(grad);
    return;
  }
  if (!passes) {
    param.waiting[mb].push_back(grad);
    return;
  }
  emit_(param_idx, grad);
  if (!param.waiting.empty()) drain(param_idx);
}

int MicrobatchOrder::next_of(Parameter& param) const {
  param.next = std::max(param.next, cursor_);
  while (param.next < num_microbatches() &&
         (finished_[param.next] ||
          (param.count > 0 && param.num_given[param.next] >= param.count))) {
    ++param.next;
  }
  return param.next;
}

void MicrobatchOrder::drain(int param_idx) {
  Parameter& param = params_[param_idx];
  while (!param.waiting.empty() &&
         param.waiting.begin()->first <= next_of(param)) {
    const auto first = param.waiting.extract(param.waiting.begin());
    for (const at::Tensor& grad : first.mapped()) emit_(param_idx, grad);
  }
}

void MicrobatchOrder::finish(int mb) {
  SMP_CHECK(mb >= 0 && mb < num_microbatches(), "microbatch ", mb,
            " was finished, but the step has ", num_microbatches());
  finished_[mb] = true;
  while (cursor_ < num_microbatches() && finished_[cursor_]) ++cursor_;
  for (size_t i = 0; i < params_.size(); ++i) drain(static_cast<int>(i));
}

void MicrobatchOrder::emit_surplus(int mb) {
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto surplus = params_[i].surplus.extract(mb);
    if (surplus.empty()) continue;
    for (const at::Tensor& grad : surplus.mapped()) {
      emit_(static_cast<int>(i), grad);
    }
  }
}

void MicrobatchOrder::finish_all() {
  finished_.assign(finished_.size(), true);
  cursor_ = num_microbatches();
  for (size_t i = 0; i < params_.size(); ++i) {
    const int param_idx = static_cast<int>(i);
    drain(param_idx);
    for (const auto& [mb, grads] : std::exchange(params_[i].surplus, {})) {
      for (const at::Tensor& grad : grads) emit_(param_idx, grad);
    }
  }
}

std::vector<int> MicrobatchOrder::counts() const {
  std::vector<int> counts;
  for (const Parameter& param : params_) {
    const auto& given = param.num_given;
    const bool are_equal =
        std::adjacent_find(given.begin(), given.end(), std::not_equal_to<>()) ==
        given.end();
    counts.push_back(are_equal && !given.empty() ? given.front() : 0);
  }
  return counts;
}

}  // namespace smp::gradients
