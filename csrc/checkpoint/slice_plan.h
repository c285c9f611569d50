#pragma once

#include <cstdint>
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

/// The reads that make up the slice `wanted` of a tensor of sizes `shape` from
/// slices that are stored, whatever the cuts of either side. Pure. Elements
/// stored more than once are read from the first source that has them; every
/// wanted element is written exactly once.
///
/// A tensor whose rows are grouped (query, key and value in one matrix, each
/// cut alike) is described by the grouped sizes: `{3, n, k}` cut along dim 1.
///
/// @param shape   sizes of the whole tensor, row-major
/// @param stored  what each source holds; empty slices are allowed
/// @param wanted  the slice to assemble
/// @throws ValueError when an interval does not fit `shape`, or when an element
///         is stored nowhere; the text names the missing elements
std::vector<SliceRead> plan_slice_reads(
    const std::vector<int64_t>& shape,
    const std::vector<topology::ShardInterval>& stored,
    const topology::ShardInterval& wanted);

}  // namespace smp::checkpoint
