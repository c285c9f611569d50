#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "csrc/kernels/multi_array.h"

// One launch works on many arrays: it gets a list of chunks by value, and each
// block does one chunk.
// Source: the multi-tensor launches of NVIDIA apex.

namespace smp::kernels::cuda {

constexpr int kChunkElements = 65536;  // one block's share of an array
constexpr int kNumThreads = 512;

// Parameters of a kernel have 4 KiB; 32,764 bytes with CUDA 12.1 and a driver
// of it, on devices of compute capability 7.0. A long list fills the device
// with few launches, each of which ends in blocks that wait for the last of
// them.
#if CUDART_VERSION >= 12010
constexpr bool has_long_lists() {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  for (int architecture : kArchitectures) {
    if (architecture < 700) return false;
  }
  return true;
}
constexpr int kDriverOfLists = has_long_lists() ? 12010 : 0;
#else
constexpr bool has_long_lists() { return false; }
constexpr int kDriverOfLists = 0;
#endif
// The limits leave room for other parameters.
constexpr int kMaxListBytes = has_long_lists() ? 32000 : 3840;
constexpr int kMaxBlocks = has_long_lists() ? 4000 : 320;

// A list as a parameter of a kernel: no thread makes a copy of it.
#if CUDART_VERSION >= 12010 && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700)
#define SMP_LIST(List) const List __grid_constant__
#else
#define SMP_LIST(List) const List
#endif

/// A list of chunks: block b does chunk `chunk_idxs[b]` of array
/// `array_idxs[b]`. The properties of an array, of type Item, are in `items`.
template <typename Item, int kMaxItems>
struct ChunkListOf {
  static_assert(kMaxItems <= 256, "array_idxs have 8 bits");
  static constexpr int kMaxArrays = kMaxItems;
  Item items[kMaxItems];
  int32_t chunk_idxs[kMaxBlocks];
  uint8_t array_idxs[kMaxBlocks];
};

struct ChunkedArray {
  void* data;
  int64_t num_elements;
  int64_t first_slot;  // of the array's results, one per chunk
};

using ChunkList = ChunkListOf<ChunkedArray, has_long_lists() ? 256 : 64>;
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

/// Calls body(integral_constant, i) for the elements of this block: kNum
/// neighbours at a time where the arrays are aligned, then one.
template <int kNum, typename Body>
__device__ inline void for_elements(Range range, bool is_aligned, Body&& body) {
  int64_t rest = range.begin;
  if (is_aligned) {
    rest += (range.end - range.begin) / kNum * kNum;
    for (int64_t i = range.begin + threadIdx.x * kNum; i < rest;
         i += kNumThreads * kNum) {
      body(std::integral_constant<int, kNum>(), i);
    }
  }
  for (int64_t i = rest + threadIdx.x; i < range.end; i += kNumThreads) {
    body(std::integral_constant<int, 1>(), i);
  }
}

/// Returns the sum over the threads of a block, in a fixed order; valid in
/// thread 0.
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

/// Returns null, or the reason why lists of this length cannot be passed.
inline const char* list_error() {
  int version = 0;
  if (const char* error = error_text(cudaDriverGetVersion(&version))) {
    return error;
  }
  return version >= kDriverOfLists
             ? nullptr
             : "this build of smp passes up to 32,764 bytes to a kernel, which "
               "needs an NVIDIA driver of CUDA 12.1 (R530) or later; update "
               "the driver, or build smp with an older CUDA toolkit";
}

/// Cuts items, each with `num_elements`, into chunks and calls
/// `launch(const List&, int num_blocks)` for each full list and the rest.
/// Stops at the first error text and returns it.
/// @param next  next(i) fills in item number i, or returns false to skip it
template <typename List, typename Next, typename Launch>
const char* for_each_chunk_list(int64_t num_items, Next&& next,
                                Launch&& launch) {
  if (const char* error = list_error()) return error;
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
