#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

#include "csrc/gradients/bucket_table.h"

namespace smp::gradients {

/// Gradients of a step beyond the number expected. Their parameters get a
/// second round, on all ranks if they need it on one rank. Guarded by the mutex
/// of its reducer.
class LateGradients {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// The arguments must outlive this object.
  LateGradients(const ReducedParameters& parameters, const BucketTable& buckets,
                const ReductionGroups& groups)
      : parameters_(parameters), buckets_(buckets), groups_(groups) {}

  void add(int param_idx, const at::Tensor& grad) {
    grads_[param_idx].push_back(grad);
  }
  void clear() { grads_.clear(); }
  int64_t num_parameters() const { return std::ssize(grads_); }
  bool has(int param_idx) const { return grads_.contains(param_idx); }

  /// Sums them over the ranks of the first sum and adds them to it.
  /// @param late         by parameter: some rank has such gradients
  /// @param goes_further  whether the first sum is summed over the further
  ///     groups already: then these gradients are too
  /// @param lock         not held while it waits for other ranks
  void reduce(const std::vector<bool>& late, double pass_divisor,
              bool goes_further, Lock& lock);

 private:
  void reduce_bucket(int bucket_idx, const std::vector<bool>& late,
                     double pass_divisor, bool goes_further, Lock& lock);
  void sum_over(comm::Communicator& group, const at::Tensor& sum,
                int bucket_idx, Lock& lock);

  const ReducedParameters& parameters_;
  const BucketTable& buckets_;
  const ReductionGroups& groups_;
  std::map<int, std::vector<at::Tensor>> grads_;  // by parameter
};

}  // namespace smp::gradients
