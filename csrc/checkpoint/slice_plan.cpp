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

/// Returns elements `[begin, end)` of the flattened slice as ascending runs of
/// the flattened tensor. The slice is `length` elements of every `stride` from
/// `first` on.
std::vector<Run> strided_runs(int64_t first, int64_t length, int64_t stride,
                              int64_t begin, int64_t end) {
  std::vector<Run> runs;
  runs.reserve(static_cast<size_t>((end - 1) / length - begin / length + 1));
  for (int64_t at = begin; at < end;) {
    const int64_t row = at / length;
    const int64_t row_end = std::min(end, (row + 1) * length);
    const int64_t place = first + row * stride + (at - row * length);
    runs.push_back({place, place + row_end - at, at - begin});
    at = row_end;
  }
  return runs;
}

/// Returns a part as ascending runs of the flattened tensor.
std::vector<Run> runs_of(const std::vector<int64_t>& shape, const Part& part) {
  const std::vector<int64_t>& view = part.view.empty() ? shape : part.view;
  SMP_CHECK_VALUE(
      product(view, 0, view.size()) == product(shape, 0, shape.size()),
      "a tensor of ", product(shape, 0, shape.size()),
      " elements cannot be seen as one of ", product(view, 0, view.size()),
      " (part ", part.describe(), ")");
  const ShardInterval& slice = part.interval;
  const auto sizes = topology::shard_shape(view, slice);  // checks that it fits
  const int64_t slice_numel = product(sizes, 0, sizes.size());
  SMP_CHECK_VALUE(part.begin >= 0 && part.numel >= 0 &&
                      part.begin <= slice_numel - part.numel,
                  "part ", part.describe(), " does not fit a slice of ",
                  slice_numel, " elements");
  if (part.numel == 0) return {};
  const int64_t end = part.begin + part.numel;
  if (slice.dim == ShardInterval::kFlat || slice.is_whole()) {
    const int64_t first = slice.dim == ShardInterval::kFlat ? slice.begin : 0;
    return {{first + part.begin, first + end, 0}};
  }
  const size_t dim = static_cast<size_t>(slice.dim);
  const int64_t inner = product(view, dim + 1, view.size());
  return strided_runs(slice.begin * inner, slice.size() * inner,
                      slice.extent * inner, part.begin, end);
}

/// Moves the elements that `source` covers out of `missing` into `reads`.
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

std::string Part::describe() const {
  return smp::detail::concat(interval.describe(), ", elements [", begin, ", ",
                             begin + numel, ")");
}

std::vector<SliceRead> plan_part_reads(const std::vector<int64_t>& shape,
                                       const std::vector<Part>& stored,
                                       const Part& wanted) {
  std::vector<Run> missing = runs_of(shape, wanted);
  std::vector<SliceRead> reads;
  for (size_t i = 0; i < stored.size(); ++i) {
    const auto runs = runs_of(shape, stored[i]);
    if (!missing.empty()) take(runs, static_cast<int>(i), missing, reads);
  }
  int64_t num_missing = 0;
  for (const Run& run : missing) num_missing += run.end - run.begin;
  SMP_CHECK_VALUE(
      missing.empty(), num_missing, " elements of the wanted part (",
      wanted.describe(), ") are stored nowhere, first [", missing[0].begin,
      ", ", missing[0].end, ") of the flattened tensor; ", stored.size(),
      " stored parts were given: a file of the checkpoint is missing");
  return compress(reads);
}

}  // namespace smp::checkpoint
