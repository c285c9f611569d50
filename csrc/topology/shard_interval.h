#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace smp::topology {

/// The slice of a tensor that a rank holds: indices `[begin, end)` of one dim,
/// or of the flattened tensor. Parameters, flat buckets, optimizer shards and
/// checkpoints all describe their part with it.
struct ShardInterval {
  static constexpr int kFlat = -1;  ///< `dim` of a cut through the flat tensor

  int dim = 0;         ///< the cut tensor dim, or kFlat
  int64_t begin = 0;   ///< first index held
  int64_t end = 0;     ///< one past the last index held
  int64_t extent = 0;  ///< size of the whole dim (of the whole tensor if flat)

  /// Returns all of a dim.
  static ShardInterval whole(int64_t extent, int dim = 0);

  /// Returns part `shard_idx` of `num_shards` equal parts.
  /// @throws ValueError when `num_shards` does not divide `extent`
  static ShardInterval even(int64_t extent, int num_shards, int shard_idx,
                            int dim = 0);

  /// Returns part `shard_idx` of a flat tensor in parts of `ceil(numel /
  /// num_shards)` elements; the last parts may be shorter or empty.
  static ShardInterval flat(int64_t numel, int num_shards, int shard_idx);

  int64_t size() const { return end - begin; }
  bool empty() const { return begin == end; }
  bool is_whole() const { return begin == 0 && end == extent; }

  /// Returns "dim 0 [4, 8) of 16" or "flat [0, 100) of 400".
  std::string describe() const;

  bool operator==(const ShardInterval&) const = default;
};

/// Returns the sizes of the held slice of a tensor of sizes `shape`; one dim,
/// the number of elements, when the cut is flat.
/// @throws ValueError when the interval does not belong to such a tensor
std::vector<int64_t> shard_shape(const std::vector<int64_t>& shape,
                                 const ShardInterval& shard);

}  // namespace smp::topology
