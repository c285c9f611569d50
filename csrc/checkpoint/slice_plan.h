#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/topology/shard_interval.h"

namespace smp::checkpoint {

/// Copies equal runs of elements out of one stored slice: for `i` in
/// `[0, num_runs)`, `run_length` elements from `src_offset + i * src_stride`
/// to `dst_offset + i * dst_stride`. Offsets count elements in the contiguous
/// buffers of the stored slice and of the wanted slice.
struct SliceRead {
  int source_idx = 0;  ///< index into the `stored` argument
  int64_t src_offset = 0;
  int64_t dst_offset = 0;
  int64_t run_length = 0;
  int64_t num_runs = 1;
  int64_t src_stride = 0;  ///< 0 when there is one run
  int64_t dst_stride = 0;

  bool operator==(const SliceRead&) const = default;
};

/// Elements of a tensor that one rank holds. The tensor is seen with sizes
/// `view` (its own when empty) and cut to the slice `interval`; of that slice,
/// flattened row-major, the part is the elements `[begin, begin + numel)`.
struct Part {
  topology::ShardInterval interval;
  int64_t begin = 0;
  int64_t numel = 0;
  std::vector<int64_t> view = {};

  /// Returns a text like "dim 0 [4, 8) of 16, elements [0, 64)".
  std::string describe() const;
};

/// Returns the reads that make up the part `wanted` of a tensor of sizes
/// `shape` from parts that are stored, whatever the cuts of either side. Pure.
/// Elements stored more than once are read from the first source that has them;
/// every wanted element is written exactly once. Time grows with the rows that
/// parts really hold, not with those of the tensor.
///
/// @param shape   sizes of the whole tensor, row-major
/// @param stored  part of each source; empty parts are allowed
/// @param wanted  the part to assemble
/// @throws ValueError when a part does not fit `shape`, or when an element is
///     stored nowhere; the text names the missing elements
///         stored nowhere; the text names the missing elements
std::vector<SliceRead> plan_part_reads(const std::vector<int64_t>& shape,
                                       const std::vector<Part>& stored,
                                       const Part& wanted);

}  // namespace smp::checkpoint
