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

void for_chunks(const std::vector<Chunk>& chunks,
                const std::function<void(const Chunk&, size_t)>& run) {
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
    auto it = std::upper_bound(ends.begin(), ends.end(), begin);
    for (; it != ends.end() && *it <= end; ++it) {
      const auto idx = static_cast<size_t>(it - ends.begin());
      run(chunks[idx], idx);
    }
  });
}

}  // namespace smp::optim
