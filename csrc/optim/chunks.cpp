#include "csrc/optim/chunks.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace smp::optim {

std::vector<Chunk> cut(const std::vector<int64_t>& sizes) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < sizes.size(); ++i) {
    for (int64_t begin = 0; begin < sizes[i]; begin += kChunkElements) {
      chunks.push_back({static_cast<int64_t>(i), begin,
                        std::min(begin + kChunkElements, sizes[i])});
    }
  }
  return chunks;
}

namespace {

// Calls each_part(begin, end), numbers of chunks, on several threads.
template <typename EachPart>
void for_parts(const std::vector<Chunk>& chunks, EachPart&& each_part) {
  constexpr int64_t kGrain = 32768;
  // ends[i]: number of elements up to the end of chunk i.
  std::vector<int64_t> ends;
  ends.reserve(chunks.size());
  int64_t total = 0;
  for (const Chunk& chunk : chunks) {
    total += chunk.end - chunk.begin;
    ends.push_back(total);
  }
  // A thread does the chunks that end in its part of all elements.
  at::parallel_for(0, total, kGrain, [&](int64_t begin, int64_t end) {
    const auto first = std::upper_bound(ends.begin(), ends.end(), begin);
    const auto last = std::upper_bound(first, ends.end(), end);
    each_part(static_cast<size_t>(first - ends.begin()),
              static_cast<size_t>(last - ends.begin()));
  });
}

}  // namespace

void for_chunks(const std::vector<Chunk>& chunks, const ChunkFunction& run) {
  for_parts(chunks, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) run(chunks[i], i);
  });
}

void for_chunks_backwards(const std::vector<Chunk>& chunks,
                          const ChunkFunction& run) {
  for_parts(chunks, [&](size_t begin, size_t end) {
    for (size_t i = end; i > begin; --i) run(chunks[i - 1], i - 1);
  });
}

}  // namespace smp::optim
