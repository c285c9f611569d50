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
  /// Most bytes that each partition may hold; empty for no limits.
  std::vector<int64_t> memory_limits = {};
  /// False: if nothing keeps the limits, the least memory is found instead of
  /// an error raised.
  bool must_fit = true;
  /// Share of the time of earlier stages in a stage's load, since it waits for
  /// them in each step: 1 / microbatches, or less. See partition.md, "Time".
  double lead_weight = 0;
  /// Speed of each partition's device, in any one unit; empty: all are alike.
  std::vector<double> speeds = {};
  /// True: the limits are proportions for the balance of memory, and no limits.
  bool may_exceed = false;

  bool is_limited() const { return !memory_limits.empty() && !may_exceed; }
  int num_stages() const { return num_partitions * num_chunks; }
  int kept(int stage) const {
    return kept_microbatches.empty()
               ? 1
               : kept_microbatches[stage % num_partitions];
  }
  /// Returns the time of work on a stage, over that on a device of mean speed.
  double slowness(int stage) const {
    return speeds.empty() ? 1 : mean(speeds) / speeds[stage % num_partitions];
  }
  /// Returns the share of a byte in the memory of a stage's device, over that
  /// on a device of mean memory.
  double tightness(int stage) const {
    return memory_limits.empty()
               ? 1
               : mean(memory_limits) /
                     static_cast<double>(memory_limits[stage % num_partitions]);
  }

 private:
  template <typename Number>
  double mean(const std::vector<Number>& numbers) const {
    double sum = 0;
    for (const Number number : numbers) sum += static_cast<double>(number);
    return sum / num_partitions;
  }
};

/// @throws ValueError for the first option that is out of range
void check_options(const PartitionOptions& options);

}  // namespace smp::partition
