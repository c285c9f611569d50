#include "csrc/kernels/multi_array.h"

#include <type_traits>
#include <vector>

#include "csrc/kernels/cuda/chunks.cuh"
#include "csrc/kernels/cuda/element.cuh"

namespace smp::kernels::cuda {

namespace {

// Elements [begin, end) of an array that this block works on.
struct Range {
  int64_t begin;
  int64_t end;
};

__device__ Range block_range(const ChunkList& list, int array_idx) {
  const int64_t begin =
      static_cast<int64_t>(list.chunk_idxs[blockIdx.x]) * kChunkElements;
  const int64_t end = begin + kChunkElements;
  const int64_t size = list.num_elements[array_idx];
  return {begin, end < size ? end : size};
}

// Sum over the threads of a block, in a fixed order; valid in thread 0.
__device__ double block_sum(double value) {
  __shared__ double values[kNumThreads];
  values[threadIdx.x] = value;
  __syncthreads();
  for (int half = kNumThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    __syncthreads();
  }
  return values[0];
}

template <typename T>
__global__ void sum_of_squares_kernel(ChunkList list, double* partial_sums) {
  using Compute = typename Element<T>::Compute;
  const int array_idx = list.array_idxs[blockIdx.x];
  const T* data = static_cast<const T*>(list.y[array_idx]);
  const Range range = block_range(list, array_idx);
  Compute sum = 0;
  for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kNumThreads) {
    const Compute value = Element<T>::load(data[i]);
    sum += value * value;
  }
  const double total = block_sum(static_cast<double>(sum));
  if (threadIdx.x == 0) partial_sums[blockIdx.x] = total;
}

__global__ void add_partial_sums_kernel(const double* partial_sums,
                                        int64_t num_partial_sums,
                                        double* result) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < num_partial_sums; i += kNumThreads) {
    sum += partial_sums[i];
  }
  const double total = block_sum(sum);
  if (threadIdx.x == 0) *result = total;
}

template <typename T>
__global__ void scale_kernel(ChunkList list, const double* factor) {
  using Compute = typename Element<T>::Compute;
  const int array_idx = list.array_idxs[blockIdx.x];
  T* data = static_cast<T*>(list.y[array_idx]);
  const Range range = block_range(list, array_idx);
  const Compute f = static_cast<Compute>(*factor);
  for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kNumThreads) {
    data[i] = Element<T>::store(Element<T>::load(data[i]) * f);
  }
}

template <typename T>
__global__ void add_scaled_kernel(ChunkList list, double a) {
  using Compute = typename Element<T>::Compute;
  const int array_idx = list.array_idxs[blockIdx.x];
  T* y = static_cast<T*>(list.y[array_idx]);
  const T* x = static_cast<const T*>(list.x[array_idx]);
  const Range range = block_range(list, array_idx);
  const Compute f = static_cast<Compute>(a);
  for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kNumThreads) {
    y[i] =
        Element<T>::store(Element<T>::load(y[i]) + f * Element<T>::load(x[i]));
  }
}

std::vector<ArrayPair> as_pairs(const Array* arrays, int64_t num_arrays) {
  std::vector<ArrayPair> pairs;
  for (int64_t i = 0; i < num_arrays; ++i) {
    pairs.push_back(
        {arrays[i].data, nullptr, arrays[i].num_elements, arrays[i].dtype});
  }
  return pairs;
}

}  // namespace

int64_t num_partial_sums(const Array* arrays, int64_t num_arrays) {
  int64_t count = 0;
  for (int64_t i = 0; i < num_arrays; ++i) {
    count += num_chunks(arrays[i].num_elements);
  }
  return count;
}

const char* sum_of_squares(const Array* arrays, int64_t num_arrays,
                           double* partial_sums, double* result, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const std::vector<ArrayPair> pairs = as_pairs(arrays, num_arrays);
  int64_t num_partials = 0;
  const char* error = for_each_dtype([&](Dtype dtype, auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return for_each_chunk_list(
        pairs.data(), num_arrays, dtype,
        [&](const ChunkList& list, int num_blocks) {
          sum_of_squares_kernel<T><<<num_blocks, kNumThreads, 0, cuda_stream>>>(
              list, partial_sums + num_partials);
          num_partials += num_blocks;
          return error_text(cudaGetLastError());
        });
  });
  if (error != nullptr) return error;
  add_partial_sums_kernel<<<1, kNumThreads, 0, cuda_stream>>>(
      partial_sums, num_partials, result);
  return error_text(cudaGetLastError());
}

const char* scale(const Array* arrays, int64_t num_arrays, const double* factor,
                  void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const std::vector<ArrayPair> pairs = as_pairs(arrays, num_arrays);
  return for_each_dtype([&](Dtype dtype, auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return for_each_chunk_list(
        pairs.data(), num_arrays, dtype,
        [&](const ChunkList& list, int num_blocks) {
          scale_kernel<T>
              <<<num_blocks, kNumThreads, 0, cuda_stream>>>(list, factor);
          return error_text(cudaGetLastError());
        });
  });
}

const char* add_scaled(const ArrayPair* pairs, int64_t num_pairs, double a,
                       void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return for_each_dtype([&](Dtype dtype, auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return for_each_chunk_list(
        pairs, num_pairs, dtype, [&](const ChunkList& list, int num_blocks) {
          add_scaled_kernel<T>
              <<<num_blocks, kNumThreads, 0, cuda_stream>>>(list, a);
          return error_text(cudaGetLastError());
        });
  });
}

}  // namespace smp::kernels::cuda
