#pragma once

#include <cstdint>
#include <vector>

namespace smp::partition {

struct PartitionOptions {
  int num_partitions = 1;
  double memory_weight = 0.8;  ///< 1 balances only memory, 0 only time
  /// Stages per partition. Stage `i` is chunk `i / num_partitions` of partition
  /// `i % num_partitions`.
  int num_chunks = 1;
  /// Microbatches whose activations the schedule keeps, per partition; empty:
  /// 1.
  std::vector<int> kept_microbatches = {};
  /// Bytes that a byte of parameters takes with its gradient and optimizer
  /// state.
  double state_factor = 4;
  /// Most bytes that a partition may hold; 0 for no limit.
  int64_t memory_limit_bytes = 0;
  /// False: if nothing keeps the limit, the least memory is found instead of an
  /// error raised.
  bool must_fit = true;
  /// Share of the time of earlier stages in a stage's load, since it waits for
  /// them in each step: 1 / microbatches, or less. See partition.md, "Time".
  double lead_weight = 0;

  int num_stages() const { return num_partitions * num_chunks; }
  int kept(int stage) const {
    return kept_microbatches.empty()
               ? 1
               : kept_microbatches[stage % num_partitions];
  }
};

/// @throws ValueError for the first option that is out of range
void check_options(const PartitionOptions& options);

}  // namespace smp::partition
