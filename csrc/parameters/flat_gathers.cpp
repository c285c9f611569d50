#include "csrc/parameters/flat_gathers.h"

#include <utility>

#include "csrc/common/check.h"

namespace smp::parameters {

FlatGathers::FlatGathers(std::vector<at::Tensor> flats,
                         comm::CommunicatorPtr shard, comm::WaitOptions wait)
    : flats_(std::move(flats)),
      shard_(std::move(shard)),
      wait_(std::move(wait)),
      works_(flats_.size()) {
  for (const at::Tensor& flat : flats_) {
    SMP_CHECK_VALUE(flat.dim() == 1 && flat.is_contiguous() &&
                        flat.numel() % shard_->size() == 0,
                    "flat parameters of sizes ", flat.sizes(),
                    " are not divided over ", shard_->size(), " ranks");
  }
}

void FlatGathers::launch() {
  wait_all();
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < flats_.size(); ++i) {
    const at::Tensor& flat = flats_[i];
    const int64_t numel = flat.numel() / shard_->size();
    const at::Tensor own = flat.narrow(0, shard_->group_rank() * numel, numel);
    works_[i] = shard_->all_gather(flat, own);
    ++num_pending_;
    ++num_gathers_;
  }
}

comm::WorkPtr FlatGathers::work_of(int flat_idx) const {
  const std::lock_guard lock(mutex_);
  return works_.at(flat_idx);
}

void FlatGathers::forget(int flat_idx, const comm::WorkPtr& work) {
  const std::lock_guard lock(mutex_);
  if (works_[flat_idx] != work) return;  // another thread has waited as well
  works_[flat_idx] = nullptr;
  --num_pending_;
}

void FlatGathers::await(int flat_idx) {
  const comm::WorkPtr work = work_of(flat_idx);
  if (!work) return;
  comm::follow(*work, wait_, *shard_,
               detail::concat("gather of updated parameters, bucket ", flat_idx,
                              " of ", flats_.size()));
  forget(flat_idx, work);
}

void FlatGathers::wait(const std::vector<int>& flat_idxs) {
  for (const int flat_idx : flat_idxs) {
    if (!work_of(flat_idx)) continue;
    await(flat_idx);
    ++num_overlapped_;
  }
}

void FlatGathers::wait_all() {
  for (size_t i = 0; i < flats_.size() && pending(); ++i) {
    await(static_cast<int>(i));
  }
}

void FlatGathers::finish(std::chrono::milliseconds timeout) {
  for (size_t i = 0; i < flats_.size() && pending(); ++i) {
    const int flat_idx = static_cast<int>(i);
    const comm::WorkPtr work = work_of(flat_idx);
    if (!work) continue;
    work->wait(timeout);
    forget(flat_idx, work);
  }
}

}  // namespace smp::parameters
