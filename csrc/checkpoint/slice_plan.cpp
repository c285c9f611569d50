#include "csrc/checkpoint/slice_plan.h"

#include <algorithm>

#include "csrc/common/check.h"

namespace smp::checkpoint {

namespace {

using topology::ShardInterval;

/// Elements `[begin, end)` of the flattened whole tensor; the first lies at
/// `offset` of the slice's own buffer.
struct Run {
  int64_t begin;
  int64_t end;
  int64_t offset;
};

int64_t product(const std::vector<int64_t>& sizes, size_t first, size_t last) {
  int64_t result = 1;
  for (size_t i = first; i < last; ++i) result *= sizes[i];
  return result;
}

/// A slice as ascending runs of the flattened tensor.
std::vector<Run> runs_of(const std::vector<int64_t>& shape,
                         const ShardInterval& slice) {
  topology::shard_shape(shape, slice);  // checks that it fits
  if (slice.empty()) return {};
  if (slice.dim == ShardInterval::kFlat) {
    return {{slice.begin, slice.end, 0}};
  }
  const size_t dim = static_cast<size_t>(slice.dim);
  const int64_t num_outer = product(shape, 0, dim);
  const int64_t inner = product(shape, dim + 1, shape.size());
  if (num_outer * inner == 0) return {};
  if (slice.is_whole()) return {{0, num_outer * slice.extent * inner, 0}};
  const int64_t length = slice.size() * inner;
  std::vector<Run> runs;
  runs.reserve(num_outer);
  for (int64_t i = 0; i < num_outer; ++i) {
    const int64_t begin = (i * slice.extent + slice.begin) * inner;
    runs.push_back({begin, begin + length, i * length});
  }
  return runs;
}

/// Moves what `source` covers out of `missing` into `reads`.
void take(const std::vector<Run>& source, int source_idx,
          std::vector<Run>& missing, std::vector<SliceRead>& reads) {
  std::vector<Run> still_missing;
  size_t next = 0;
  for (Run want : missing) {
    while (next < source.size() && source[next].end <= want.begin) ++next;
    size_t i = next;
    for (; i < source.size() && source[i].begin < want.end; ++i) {
      const Run& have = source[i];
      if (have.begin > want.begin) {
        still_missing.push_back({want.begin, have.begin, want.offset});
      }
      const int64_t begin = std::max(have.begin, want.begin);
      const int64_t end = std::min(have.end, want.end);
      reads.push_back({source_idx, have.offset + begin - have.begin,
                       want.offset + begin - want.begin, end - begin});
      want.offset += end - want.begin;
      want.begin = end;
    }
    if (want.begin < want.end) still_missing.push_back(want);
  }
  missing = std::move(still_missing);
}

/// Appends `read` to `last` when both together are one strided copy.
bool extend(SliceRead& last, const SliceRead& read) {
  if (last.source_idx != read.source_idx) return false;
  const int64_t src_step = read.src_offset - last.src_offset;
  const int64_t dst_step = read.dst_offset - last.dst_offset;
  if (last.num_runs == 1 && src_step == last.run_length &&
      dst_step == last.run_length) {
    last.run_length += read.run_length;
    return true;
  }
  if (last.run_length != read.run_length) return false;
  if (last.num_runs == 1) {
    last.src_stride = src_step;
    last.dst_stride = dst_step;
  } else if (src_step != last.num_runs * last.src_stride ||
             dst_step != last.num_runs * last.dst_stride) {
    return false;
  }
  ++last.num_runs;
  return true;
}

std::vector<SliceRead> compress(const std::vector<SliceRead>& reads) {
  std::vector<SliceRead> result;
  for (const SliceRead& read : reads) {
    if (result.empty() || !extend(result.back(), read)) result.push_back(read);
  }
  return result;
}

}  // namespace

std::vector<SliceRead> plan_slice_reads(
    const std::vector<int64_t>& shape, const std::vector<ShardInterval>& stored,
    const ShardInterval& wanted) {
  std::vector<Run> missing = runs_of(shape, wanted);
  std::vector<SliceRead> reads;
  for (size_t i = 0; i < stored.size(); ++i) {
    take(runs_of(shape, stored[i]), static_cast<int>(i), missing, reads);
  }
  int64_t num_missing = 0;
  for (const Run& run : missing) num_missing += run.end - run.begin;
  SMP_CHECK_VALUE(
      missing.empty(), num_missing, " elements of the wanted slice (",
      wanted.describe(), ") are stored nowhere, first [", missing[0].begin,
      ", ", missing[0].end, ") of the flattened tensor; ", stored.size(),
      " stored slices were given: a file of the checkpoint is missing");
  return compress(reads);
}

}  // namespace smp::checkpoint
