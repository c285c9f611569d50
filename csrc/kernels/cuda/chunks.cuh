#pragma once

#include <cuda_runtime.h>

#include "csrc/kernels/multi_array.h"

namespace smp::kernels::cuda {

constexpr int kChunkElements = 65536;  // one block's share of an array
constexpr int kNumThreads = 512;
// Sized so that the list fits the 4 KiB of kernel parameters.
constexpr int kMaxArrays = 64;
constexpr int kMaxBlocks = 320;

/// The chunks that one launch works on, passed by value: block b does chunk
/// `chunk_idxs[b]` of array `array_idxs[b]`.
struct ChunkList {
  void* y[kMaxArrays];
  const void* x[kMaxArrays];  // null where the kernel has one array only
  int64_t num_elements[kMaxArrays];
  int32_t chunk_idxs[kMaxBlocks];
  uint8_t array_idxs[kMaxBlocks];
};
static_assert(sizeof(ChunkList) <= 3968, "must leave room for arguments");

inline int64_t num_chunks(int64_t num_elements) {
  return (num_elements + kChunkElements - 1) / kChunkElements;
}

inline const char* error_text(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

/// Cuts the pairs of one dtype into chunks and calls
/// `launch(const ChunkList&, int num_blocks)` for each full list and the rest.
/// Stops at the first error text and returns it.
template <typename Launch>
const char* for_each_chunk_list(const ArrayPair* pairs, int64_t num_pairs,
                                Dtype dtype, Launch&& launch) {
  ChunkList list = {};
  int num_arrays = 0;
  int num_blocks = 0;
  for (int64_t i = 0; i < num_pairs; ++i) {
    if (pairs[i].dtype != dtype) continue;
    const int64_t chunks = num_chunks(pairs[i].num_elements);
    int array_idx = -1;  // not in the list that is being filled
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (num_blocks == kMaxBlocks ||
          (array_idx < 0 && num_arrays == kMaxArrays)) {
        if (const char* error = launch(list, num_blocks)) return error;
        num_arrays = num_blocks = 0;
        array_idx = -1;
      }
      if (array_idx < 0) {
        array_idx = num_arrays++;
        list.y[array_idx] = pairs[i].y;
        list.x[array_idx] = pairs[i].x;
        list.num_elements[array_idx] = pairs[i].num_elements;
      }
      list.array_idxs[num_blocks] = static_cast<uint8_t>(array_idx);
      list.chunk_idxs[num_blocks] = static_cast<int32_t>(chunk);
      ++num_blocks;
    }
  }
  return num_blocks > 0 ? launch(list, num_blocks) : nullptr;
}

}  // namespace smp::kernels::cuda
