#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "csrc/parameters/storage_pool.h"

namespace smp::parameters {

/// A parameter of which this rank keeps one part. The whole parameter has
/// memory only while it is in use; then the parameter shows it, else it shows a
/// placeholder.
///
/// One storage holds the whole parameter at all times, and its memory comes and
/// goes: views that autograd has saved are valid again after the next gather,
/// as in FSDP. Neither counts as a change of the parameter's values.
class ShardedParameter {
 public:
  /// @param param  shows its placeholder, of the true shape
  /// @param shard  [c] with c = ceil(numel / num_shards): elements
  ///     [r * c, (r + 1) * c) of the flattened parameter on rank r, then zeros.
  ///     May be given other memory later, through `set_data`
  ShardedParameter(at::Tensor param, at::Tensor shard, int num_shards,
                   StoragePool& pool);

  int64_t numel() const { return param_.numel(); }
  /// Returns the bytes of the parts of all ranks together.
  int64_t num_bytes() const { return num_shards_ * shard_bytes(); }
  int64_t shard_bytes() const { return static_cast<int64_t>(shard_.nbytes()); }
  int64_t item_bytes() const {
    return static_cast<int64_t>(shard_.element_size());
  }
  const at::Tensor& shard() const { return shard_; }

  /// Returns the parts of all ranks, [num_shards * c]; valid between `allocate`
  /// and `release`.
  const at::Tensor& parts() const { return parts_; }
  /// Returns the same memory in the shape of the parameter.
  const at::Tensor& whole() const { return whole_; }
  bool has_memory() const { return has_memory_; }

  void allocate();
  /// Makes the parameter show the values of `parts`.
  void show();
  /// Makes the parameter show the placeholder, and frees the memory.
  void release();

 private:
  const at::Tensor param_;
  const at::Tensor placeholder_;
  const at::Tensor shard_;
  const int num_shards_;
  StoragePool* const pool_;
  at::Tensor parts_;
  at::Tensor whole_;
  bool has_memory_ = true;
};

}  // namespace smp::parameters
