#pragma once

#include <memory>
#include <vector>

#include "csrc/gradients/bucket_plan.h"
#include "csrc/gradients/bucket_reduction.h"
#include "csrc/gradients/flat_pool.h"
#include "csrc/gradients/reduced_parameters.h"
#include "csrc/gradients/reduction_groups.h"

namespace smp::gradients {

/// Buckets of a reducer, the places of parameters in them, and the memory that
/// they have for a while.
class BucketTable {
 public:
  /// @param options  must outlive this object
  /// @throws ValueError when parameters or groups do not fit the sharding
  BucketTable(const ReducedParameters& parameters,
              const ReductionGroups& groups, const ReducerOptions& options);
  BucketTable(const BucketTable&) = delete;
  BucketTable& operator=(const BucketTable&) = delete;

  const BucketPlan& plan() const { return plan_; }
  /// Returns the bucket of each parameter.
  std::vector<int> bucket_idxs() const;
  int size() const { return static_cast<int>(buckets_.size()); }
  BucketReduction& operator[](int bucket_idx) const {
    return *buckets_[bucket_idx];
  }
  auto begin() const { return buckets_.begin(); }
  auto end() const { return buckets_.end(); }
  BucketReduction& of(int param_idx) const {
    return *buckets_[plan_.places[param_idx].bucket_idx];
  }
  int slot_of(int param_idx) const { return plan_.places[param_idx].slot_idx; }
  FlatPool& pool() { return pool_; }
  const FlatPool& pool() const { return pool_; }

 private:
  const BucketPlan plan_;
  FlatPool pool_;
  std::vector<std::unique_ptr<BucketReduction>> buckets_;
};

}  // namespace smp::gradients
