#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "csrc/comm/forwarding_communicator.h"

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
class HookedGroup final : public comm::ForwardingCommunicator {
 public:
  /// Begins the sum of a bucket over the ranks, in place.
  /// @param bucket_idx  -1: `flat` is not a bucket, but holds gradients that
  ///     came after their bucket had left, packed one behind the other
  using Hook =
      std::function<comm::WorkPtr(int bucket_idx, const at::Tensor& flat)>;

  HookedGroup(comm::CommunicatorPtr group, Hook hook);

  /// @param flats  memory of all buckets, by their indices
  void set_buckets(std::vector<at::Tensor> flats);

  /// Sums floating numbers with the hook.
  comm::WorkPtr all_reduce(at::Tensor tensor, comm::ReduceOp op) override;

 private:
  int bucket_of(const at::Tensor& tensor) const;

  const Hook hook_;
  std::vector<at::Tensor> flats_;
};

}  // namespace smp::gradients
