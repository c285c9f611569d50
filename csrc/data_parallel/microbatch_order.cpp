#include "csrc/data_parallel/microbatch_order.h"

#include <utility>

#include "csrc/common/check.h"

namespace smp::data_parallel {

void MicrobatchOrder::begin(int num_microbatches) {
  cursor_ = 0;
  finished_.assign(num_microbatches, false);
  waiting_.assign(num_microbatches, {});
}

void MicrobatchOrder::add(int param_idx, int mb, const at::Tensor& grad) {
  const int num_microbatches = static_cast<int>(finished_.size());
  if (mb == -1) mb = cursor_;
  SMP_CHECK(mb >= 0 && mb < num_microbatches, "a gradient came for microbatch ",
            mb, ", but the step has ", num_microbatches);
  SMP_CHECK(!finished_[mb], "a gradient came for microbatch ", mb,
            ", whose backward is over; call backward on the thread that runs "
            "the step function");
  if (mb == cursor_) return emit_(param_idx, grad);
  waiting_[mb].push_back({param_idx, grad});
}

void MicrobatchOrder::finish(int mb) {
  const int num_microbatches = static_cast<int>(finished_.size());
  SMP_CHECK(mb >= 0 && mb < num_microbatches, "microbatch ", mb,
            " was finished, but the step has ", num_microbatches);
  finished_[mb] = true;
  advance();
}

void MicrobatchOrder::finish_all() {
  finished_.assign(finished_.size(), true);
  advance();
}

void MicrobatchOrder::advance() {
  while (cursor_ < static_cast<int>(finished_.size()) && finished_[cursor_]) {
    if (++cursor_ == static_cast<int>(finished_.size())) return;
    for (const Contribution& contribution :
         std::exchange(waiting_[cursor_], {})) {
      emit_(contribution.param_idx, contribution.grad);
    }
  }
}

}  // namespace smp::data_parallel
