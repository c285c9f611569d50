#include "csrc/gradients/hooked_group.h"

#include <utility>

#include "csrc/common/check.h"

namespace smp::gradients {

PromisedWork::PromisedWork(std::function<void()> finish)
    : finish_(std::move(finish)) {}

void PromisedWork::complete() {
  const std::lock_guard lock(mutex_);
  is_complete_ = true;
  changed_.notify_all();
}

bool PromisedWork::done() {
  const std::lock_guard lock(mutex_);
  return is_complete_ || is_aborted_;
}

void PromisedWork::wait(std::chrono::milliseconds timeout) {
  std::function<void()> finish;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout,
                      [this] { return is_complete_ || is_aborted_; });
    SMP_CHECK(!is_aborted_, "the future of a communication hook was given up");
    SMP_CHECK(is_complete_,
              "the future of a communication hook was not done "
              "after ",
              timeout.count(), " ms");
    finish = std::exchange(finish_, nullptr);
  }
  try {
    if (finish) finish();
  } catch (...) {
    error_ = std::current_exception();
  }
  if (error_) std::rethrow_exception(error_);
}

void PromisedWork::abort() {
  const std::lock_guard lock(mutex_);
  is_aborted_ = true;
  changed_.notify_all();
}

HookedGroup::HookedGroup(comm::CommunicatorPtr group, Hook hook)
    : ForwardingCommunicator(std::move(group)), hook_(std::move(hook)) {
  SMP_CHECK_VALUE(inner_ != nullptr, "a group of one rank reduces nothing");
}

void HookedGroup::set_buckets(std::vector<at::Tensor> flats) {
  flats_ = std::move(flats);
}

int HookedGroup::bucket_of(const at::Tensor& tensor) const {
  for (size_t i = 0; i < flats_.size(); ++i) {
    if (flats_[i].is_alias_of(tensor)) return static_cast<int>(i);
  }
  return -1;
}

comm::WorkPtr HookedGroup::all_reduce(at::Tensor tensor, comm::ReduceOp op) {
  if (op != comm::ReduceOp::kSum || !tensor.is_floating_point()) {
    return inner_->all_reduce(std::move(tensor), op);
  }
  return hook_(bucket_of(tensor), tensor);
}

}  // namespace smp::gradients
