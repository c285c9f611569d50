#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "csrc/kernels/multi_array.h"

// One launch works on many arrays: it gets a list of chunks by value, and each
// block does one chunk.
// Source: the multi-tensor launches of NVIDIA apex.

namespace smp::kernels::cuda {

constexpr int kChunkElements = 65536;  // one block's share of an array
constexpr int kNumThreads = 512;
constexpr int kMaxBlocks = 320;
// Kernel parameters have 4 KiB; this leaves room for others.
constexpr int kMaxListBytes = 3840;

/// Block b does chunk `chunk_idxs[b]` of array `array_idxs[b]`. What is known
/// of an array of type Item is in `items`.
template <typename Item, int kMaxItems>
struct ChunkListOf {
  static constexpr int kMaxArrays = kMaxItems;
  Item items[kMaxItems];
  int32_t chunk_idxs[kMaxBlocks];
  uint8_t array_idxs[kMaxBlocks];
};

struct ChunkedPair {
  void* y;
  const void* x;  // null where the kernel has one array only
  int64_t num_elements;
  int64_t first_slot;  // of the array's results, one per chunk
};

using ChunkList = ChunkListOf<ChunkedPair, 64>;
static_assert(sizeof(ChunkList) <= kMaxListBytes, "must leave room");

inline int64_t num_chunks(int64_t num_elements) {
  return (num_elements + kChunkElements - 1) / kChunkElements;
}

inline const char* error_text(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

/// Elements [begin, end) of an array that this block works on.
struct Range {
  int64_t begin;
  int64_t end;
};

template <typename List>
__device__ inline Range block_range(const List& list) {
  const int64_t begin =
      static_cast<int64_t>(list.chunk_idxs[blockIdx.x]) * kChunkElements;
  const int64_t end = begin + kChunkElements;
  const int64_t size = list.items[list.array_idxs[blockIdx.x]].num_elements;
  return {begin, end < size ? end : size};
}

/// Sum over the threads of a block, in a fixed order; valid in thread 0.
__device__ inline double block_sum(double value) {
  __shared__ double values[kNumThreads];
  __syncthreads();  // the values before may still be read
  values[threadIdx.x] = value;
  __syncthreads();
  for (int half = kNumThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    __syncthreads();
  }
  return values[0];
}

/// Cuts items, each with `num_elements`, into chunks and calls
/// `launch(const List&, int num_blocks)` for each full list and the rest.
/// Stops at the first error text and returns it.
/// @param next  next(i) fills in item number i, or returns false to skip it
template <typename List, typename Next, typename Launch>
const char* for_each_chunk_list(int64_t num_items, Next&& next,
                                Launch&& launch) {
  List list = {};
  int num_arrays = 0;
  int num_blocks = 0;
  for (int64_t i = 0; i < num_items; ++i) {
    auto item = list.items[0];
    if (!next(i, item)) continue;
    const int64_t chunks = num_chunks(item.num_elements);
    int array_idx = -1;  // not in the list that is being filled
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (num_blocks == kMaxBlocks ||
          (array_idx < 0 && num_arrays == List::kMaxArrays)) {
        if (const char* error = launch(list, num_blocks)) return error;
        num_arrays = num_blocks = 0;
        array_idx = -1;
      }
      if (array_idx < 0) {
        array_idx = num_arrays++;
        list.items[array_idx] = item;
      }
      list.array_idxs[num_blocks] = static_cast<uint8_t>(array_idx);
      list.chunk_idxs[num_blocks] = static_cast<int32_t>(chunk);
      ++num_blocks;
    }
  }
  return num_blocks > 0 ? launch(list, num_blocks) : nullptr;
}

}  // namespace smp::kernels::cuda
