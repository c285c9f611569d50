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
    : group_(std::move(group)), hook_(std::move(hook)) {
  SMP_CHECK_VALUE(group_ != nullptr, "a group of one rank reduces nothing");
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
    return group_->all_reduce(std::move(tensor), op);
  }
  return hook_(bucket_of(tensor), tensor);
}

// ---- as the group does it ---------------------------------------------------

comm::WorkPtr HookedGroup::send(const at::Tensor& tensor, int dst, int tag) {
  return group_->send(tensor, dst, tag);
}

comm::WorkPtr HookedGroup::recv(at::Tensor tensor, int src, int tag) {
  return group_->recv(std::move(tensor), src, tag);
}

comm::WorkPtr HookedGroup::recv_any(at::Tensor tensor, int tag) {
  return group_->recv_any(std::move(tensor), tag);
}

comm::WorkPtr HookedGroup::broadcast(at::Tensor tensor, int root) {
  return group_->broadcast(std::move(tensor), root);
}

comm::WorkPtr HookedGroup::all_gather(at::Tensor output,
                                      const at::Tensor& input) {
  return group_->all_gather(std::move(output), input);
}

comm::WorkPtr HookedGroup::reduce_scatter(at::Tensor output,
                                          const at::Tensor& input,
                                          comm::ReduceOp op) {
  return group_->reduce_scatter(std::move(output), input, op);
}

comm::WorkPtr HookedGroup::all_to_all(at::Tensor output,
                                      const at::Tensor& input) {
  return group_->all_to_all(std::move(output), input);
}

comm::WorkPtr HookedGroup::all_to_all_v(at::Tensor output,
                                        const at::Tensor& input,
                                        const comm::Counts& output_counts,
                                        const comm::Counts& input_counts) {
  return group_->all_to_all_v(std::move(output), input, output_counts,
                              input_counts);
}

}  // namespace smp::gradients
