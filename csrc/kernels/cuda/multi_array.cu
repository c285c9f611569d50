#include "csrc/kernels/multi_array.h"

#include <type_traits>

#include "csrc/kernels/cuda/chunks.cuh"
#include "csrc/kernels/cuda/element.cuh"
#include "csrc/kernels/cuda/fused.cuh"
#include "csrc/kernels/cuda/slots.cuh"

namespace smp::kernels::cuda {

namespace {

// Calls body(integral_constant, i) for the elements of this block.
template <typename T, typename Body>
__device__ void for_array(const ChunkList& list, Body&& body) {
  const ChunkedArray& item = list.items[list.array_idxs[blockIdx.x]];
  const auto address = reinterpret_cast<uintptr_t>(item.data);
  for_elements<kPack<T>>(block_range(list), address % 16 == 0, body);
}

// In double: squares of scaled gradients can be too large for float.
template <typename T>
__global__ void sum_of_squares_kernel(SMP_LIST(ChunkList) list, double* slots) {
  const ChunkedArray& item = list.items[list.array_idxs[blockIdx.x]];
  const T* data = static_cast<const T*>(item.data);
  double sum = 0;
  for_array<T>(list, [&](auto num, int64_t i) {
    constexpr int kNum = decltype(num)::value;
    const auto values = load_values<kNum>(data + i);
#pragma unroll
    for (int k = 0; k < kNum; ++k) {
      const auto value = static_cast<double>(values.v[k]);
      sum += value * value;
    }
  });
  const double total = block_sum(sum);
  if (threadIdx.x == 0) {
    slots[item.first_slot + list.chunk_idxs[blockIdx.x]] = total;
  }
}

template <typename T>
__global__ void max_abs_kernel(SMP_LIST(ChunkList) list, double* slots) {
  const ChunkedArray& item = list.items[list.array_idxs[blockIdx.x]];
  const T* data = static_cast<const T*>(item.data);
  const TakeMax larger;
  __shared__ double values[kNumThreads];
  double max = 0;
  for_array<T>(list, [&](auto num, int64_t i) {
    constexpr int kNum = decltype(num)::value;
    const auto elements = load_values<kNum>(data + i);
#pragma unroll
    for (int k = 0; k < kNum; ++k) {
      const auto value = static_cast<double>(elements.v[k]);
      max = larger(max, value < 0 ? -value : value);
    }
  });
  values[threadIdx.x] = max;
  __syncthreads();
  for (int half = kNumThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      values[threadIdx.x] =
          larger(values[threadIdx.x], values[threadIdx.x + half]);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    slots[item.first_slot + list.chunk_idxs[blockIdx.x]] = values[0];
  }
}

template <typename T>
__global__ void scale_kernel(SMP_LIST(ChunkList) list, const double* factor) {
  if (*factor == 1) return;
  T* data = static_cast<T*>(list.items[list.array_idxs[blockIdx.x]].data);
  const auto f = static_cast<Compute<T>>(*factor);
  for_array<T>(list, [&](auto num, int64_t i) {
    constexpr int kNum = decltype(num)::value;
    auto values = load_values<kNum>(data + i);
#pragma unroll
    for (int k = 0; k < kNum; ++k) values.v[k] *= f;
    store_values<kNum>(data + i, values);
  });
}

// Calls launch(T*, list, num_blocks) for the chunks of each dtype.
template <typename Launch>
const char* for_each_array_list(const Array* arrays, int64_t num_arrays,
                                Launch&& launch) {
  return for_each_dtype([&](Dtype dtype, auto* type) {
    int64_t slot = 0;
    return for_each_chunk_list<ChunkList>(
        num_arrays,
        [&](int64_t i, ChunkedArray& item) {
          const Array& array = arrays[i];
          item = {array.data, array.num_elements, slot};
          slot += num_chunks(array.num_elements);
          return array.dtype == dtype;
        },
        [&](const ChunkList& list, int num_blocks) {
          launch(type, list, num_blocks);
          return error_text(cudaGetLastError());
        });
  });
}

// Combines the slots of each array into one number.
template <typename Combine>
const char* combine(const Array* arrays, int64_t num_arrays,
                    const double* slots, double* results, cudaStream_t stream) {
  return combine_slots<Combine>(
      num_arrays, [&](int64_t i) { return num_chunks(arrays[i].num_elements); },
      slots, results, stream);
}

}  // namespace

int64_t num_partials(const Array* arrays, int64_t num_arrays) {
  int64_t count = 0;
  for (int64_t i = 0; i < num_arrays; ++i) {
    count += num_chunks(arrays[i].num_elements);
  }
  return count;
}

const char* sums_of_squares(const Array* arrays, int64_t num_arrays,
                            double* partials, double* results, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const char* error = for_each_array_list(
      arrays, num_arrays,
      [&](auto* type, const ChunkList& list, int num_blocks) {
        using T = std::remove_pointer_t<decltype(type)>;
        sum_of_squares_kernel<T>
            <<<num_blocks, kNumThreads, 0, cuda_stream>>>(list, partials);
      });
  if (error != nullptr) return error;
  return combine<TakeSum>(arrays, num_arrays, partials, results, cuda_stream);
}

const char* max_abs(const Array* arrays, int64_t num_arrays, double* partials,
                    double* results, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const char* error = for_each_array_list(
      arrays, num_arrays,
      [&](auto* type, const ChunkList& list, int num_blocks) {
        using T = std::remove_pointer_t<decltype(type)>;
        max_abs_kernel<T>
            <<<num_blocks, kNumThreads, 0, cuda_stream>>>(list, partials);
      });
  if (error != nullptr) return error;
  return combine<TakeMax>(arrays, num_arrays, partials, results, cuda_stream);
}

const char* scale(const Array* arrays, int64_t num_arrays, const double* factor,
                  void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return for_each_array_list(
      arrays, num_arrays,
      [&](auto* type, const ChunkList& list, int num_blocks) {
        using T = std::remove_pointer_t<decltype(type)>;
        scale_kernel<T>
            <<<num_blocks, kNumThreads, 0, cuda_stream>>>(list, factor);
      });
}

}  // namespace smp::kernels::cuda
