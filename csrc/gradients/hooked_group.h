#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "csrc/comm/communicator.h"

namespace smp::gradients {

/// An operation that other code carries out and declares finished.
class PromisedWork final : public comm::Work {
 public:
  /// @param finish  brings the result to its place; runs once, in the first
  ///     `wait` after `complete`. Only one thread waits
  explicit PromisedWork(std::function<void()> finish);

  /// Declares that the result is there, or the error that `finish` will raise.
  /// From any thread, once.
  void complete();

  bool done() override;
  void wait(std::chrono::milliseconds timeout) override;
  void abort() override;

 private:
  std::function<void()> finish_;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_complete_ = false;
  bool is_aborted_ = false;
};

/// A group of ranks in which other code sums the buckets of gradients. All
/// other operations are those of the group. The buckets are set after a reducer
/// of this group has laid them out.
class HookedGroup final : public comm::Communicator {
 public:
  /// Begins the sum of a bucket over the ranks, in place.
  /// @param bucket_idx  -1: `flat` is not a bucket, but holds gradients that
  ///     came after their bucket had left, packed one behind the other
  using Hook =
      std::function<comm::WorkPtr(int bucket_idx, const at::Tensor& flat)>;

  HookedGroup(comm::CommunicatorPtr group, Hook hook);

  /// @param flats  memory of all buckets, by their indices
  void set_buckets(std::vector<at::Tensor> flats);

  int group_rank() const override { return group_->group_rank(); }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name(); }
  comm::WorkPtr send(const at::Tensor& tensor, int dst, int tag) override;
  comm::WorkPtr recv(at::Tensor tensor, int src, int tag) override;
  comm::WorkPtr recv_any(at::Tensor tensor, int tag) override;
  /// Sums floating numbers with the hook.
  comm::WorkPtr all_reduce(at::Tensor tensor, comm::ReduceOp op) override;
  comm::WorkPtr broadcast(at::Tensor tensor, int root) override;
  comm::WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override;
  comm::WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                               comm::ReduceOp op) override;
  comm::WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) override;
  comm::WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                             const comm::Counts& output_counts,
                             const comm::Counts& input_counts) override;
  comm::WorkPtr barrier() override { return group_->barrier(); }
  bool stamp_next(uint64_t stamp) override { return group_->stamp_next(stamp); }
  bool is_stream_ordered() const override {
    return group_->is_stream_ordered();
  }
  void abort() override { group_->abort(); }

 private:
  int bucket_of(const at::Tensor& tensor) const;

  const comm::CommunicatorPtr group_;
  const Hook hook_;
  std::vector<at::Tensor> flats_;
};

}  // namespace smp::gradients
