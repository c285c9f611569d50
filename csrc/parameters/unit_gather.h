#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/parameters/gather_group.h"
#include "csrc/parameters/sharded_parameter.h"

namespace smp::parameters {

/// Size from which parameters are gathered in their place, in one collective
/// each; smaller ones share one, which costs two copies of them.
inline constexpr int64_t kAloneBytes = int64_t{1} << 20;

/// Some parameters on their way to this rank.
class UnitGather {
 public:
  /// Begins the gather. Collective.
  /// @param params  none of them has memory; alive until the gather has
  ///     finished
  /// @param stamp   stamp of the unit; equal on all ranks
  UnitGather(std::vector<ShardedParameter*> params, GatherGroup& group,
             uint64_t stamp, std::string what);

  /// Waits (on a device: makes the current stream wait), then lets the
  /// parameters show their values. Thread-safe; may be called again.
  /// @throws comm::Disagreement when another rank gathers something else
  void finish(const comm::WaitOptions& wait);

  int num_collectives() const { return static_cast<int>(gathers_.size()); }

 private:
  void gather_alone(ShardedParameter& param, GatherGroup& group);
  void gather_together(GatherGroup& group);
  at::Tensor packed_shards() const;
  void copy_out();

  const std::vector<ShardedParameter*> params_;
  const uint64_t stamp_;
  const std::string what_;
  GatherPtr comparison_;  // of the stamp; null: gathers compare it
  std::vector<GatherPtr> gathers_;

  // Parameters that share a collective.
  std::vector<ShardedParameter*> small_;
  std::vector<int64_t> offsets_;  // in bytes, of a rank's part
  int64_t part_bytes_ = 0;
  at::Tensor flat_;  // [size * part_bytes], uint8

  std::mutex mutex_;
  bool is_finished_ = false;
};

}  // namespace smp::parameters
