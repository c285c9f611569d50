#include "csrc/topology/shard_interval.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "csrc/common/check.h"

namespace smp::topology {

namespace {

void check_index(int num_shards, int shard_idx) {
  SMP_CHECK_VALUE(num_shards >= 1 && shard_idx >= 0 && shard_idx < num_shards,
                  "shard ", shard_idx, " of ", num_shards, " does not exist");
}

}  // namespace

ShardInterval ShardInterval::whole(int64_t extent, int dim) {
  return {dim, 0, extent, extent};
}

ShardInterval ShardInterval::even(int64_t extent, int num_shards, int shard_idx,
                                  int dim) {
  check_index(num_shards, shard_idx);
  SMP_CHECK_VALUE(extent % num_shards == 0, "a dim of size ", extent,
                  " cannot be cut into ", num_shards,
                  " equal parts; use a divisor of the size");
  const int64_t part = extent / num_shards;
  return {dim, part * shard_idx, part * (shard_idx + 1), extent};
}

ShardInterval ShardInterval::flat(int64_t numel, int num_shards,
                                  int shard_idx) {
  check_index(num_shards, shard_idx);
  const int64_t part = (numel + num_shards - 1) / num_shards;
  return {kFlat, std::min(numel, part * shard_idx),
          std::min(numel, part * (shard_idx + 1)), numel};
}

std::string ShardInterval::describe() const {
  const std::string cut =
      dim == kFlat ? std::string("flat") : detail::concat("dim ", dim);
  return detail::concat(cut, " [", begin, ", ", end, ") of ", extent);
}

std::vector<int64_t> shard_shape(const std::vector<int64_t>& shape,
                                 const ShardInterval& shard) {
  const int num_dims = static_cast<int>(shape.size());
  SMP_CHECK_VALUE(shard.dim == ShardInterval::kFlat ||
                      (shard.dim >= 0 && shard.dim < num_dims),
                  "interval ", shard.describe(), " names a dim that a tensor ",
                  "of ", num_dims, " dims does not have");
  const bool is_flat = shard.dim == ShardInterval::kFlat;
  const int64_t extent = is_flat
                             ? std::accumulate(shape.begin(), shape.end(),
                                               int64_t{1}, std::multiplies<>())
                             : shape[shard.dim];
  SMP_CHECK_VALUE(shard.extent == extent && shard.begin >= 0 &&
                      shard.begin <= shard.end && shard.end <= extent,
                  "interval ", shard.describe(), " does not fit an extent of ",
                  extent);
  if (is_flat) return {shard.size()};
  std::vector<int64_t> result = shape;
  result[shard.dim] = shard.size();
  return result;
}

}  // namespace smp::topology
