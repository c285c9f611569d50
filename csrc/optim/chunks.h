#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace smp::optim {

/// Elements [begin, end) of one array of a list. The cuts of an array depend on
/// its size only, so sums over chunks do not depend on the number of threads.
struct Chunk {
  int64_t array_idx = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

constexpr int64_t kChunkElements = 65536;

/// Returns the chunks of arrays of these sizes, in order; an empty array has
/// none.
std::vector<Chunk> cut(const std::vector<int64_t>& sizes);

/// Returns the chunks of arrays that have `num_elements`.
template <typename Arrays>
std::vector<Chunk> chunks_of(const std::vector<Arrays>& arrays) {
  std::vector<int64_t> sizes;
  sizes.reserve(arrays.size());
  for (const Arrays& a : arrays) sizes.push_back(a.num_elements);
  return cut(sizes);
}

using ChunkFunction = std::function<void(const Chunk&, size_t)>;

/// Calls run(chunk, idx) for all chunks, on the threads of torch, each with
/// about as many elements.
void for_chunks(const std::vector<Chunk>& chunks, const ChunkFunction& run);

/// Calls run likewise, each thread from its last chunk to its first: data read
/// last in `for_chunks` over arrays of these sizes may still be in the caches.
void for_chunks_backwards(const std::vector<Chunk>& chunks,
                          const ChunkFunction& run);

}  // namespace smp::optim
