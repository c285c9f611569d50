#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "csrc/kernels/cuda/element.cuh"

// Code that the fused kernels share: 16-byte accesses, sums over the threads of
// a row, launches.

namespace smp::kernels::cuda {

template <typename T>
using Compute = typename Element<T>::Compute;

inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

/// A pack of kNum neighbouring elements in the type that is computed in.
template <typename C, int kNum>
struct Values {
  C v[kNum];
};

// Elements as they lie in memory, read and written at once.
template <typename T, int kNum>
struct alignas(sizeof(T) * kNum < 16 ? sizeof(T) * kNum : 16) Pack {
  T v[kNum];
};

template <int kNum, typename T>
__device__ inline Pack<T, kNum> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, kNum>*>(p);
}

// Stores a pack. Where elements are computed one by one, the compiler takes the
// assignment of a pack apart, into stores of 4 bytes, but leaves these stores
// whole.
template <int kNum, typename T>
__device__ inline void store_pack(T* p, const Pack<T, kNum>& pack) {
  using Word = std::conditional_t<sizeof(pack) % 16 == 0, uint4, uint2>;
  if constexpr (sizeof(pack) % sizeof(Word) == 0) {
    Word words[sizeof(pack) / sizeof(Word)];
    memcpy(words, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); ++i) {
      __stwb(reinterpret_cast<Word*>(p) + i, words[i]);
    }
  } else {
    *reinterpret_cast<Pack<T, kNum>*>(p) = pack;
  }
}

template <int kNum, typename T>
__device__ inline Values<Compute<T>, kNum> load_values(const T* p) {
  const auto pack = load_pack<kNum>(p);
  Values<Compute<T>, kNum> values;
#pragma unroll
  for (int i = 0; i < kNum; ++i) values.v[i] = Element<T>::load(pack.v[i]);
  return values;
}

template <int kNum, typename T>
__device__ inline void store_values(T* p,
                                    const Values<Compute<T>, kNum>& values) {
  Pack<T, kNum> pack;
#pragma unroll
  for (int i = 0; i < kNum; ++i) pack.v[i] = Element<T>::store(values.v[i]);
  store_pack<kNum>(p, pack);
}

// Returns whether data that all rows share can be accessed as packs; the choice
// of kNum has not checked their address. All threads get the same answer.
template <int kNum, typename C>
__device__ inline bool is_pack(const C* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Pack<C, kNum>) == 0;
}

template <int kNum, typename C>
__device__ inline Values<C, kNum> load_shared(const C* p) {
  if (is_pack<kNum>(p)) return load_values<kNum>(p);
  Values<C, kNum> values;
#pragma unroll
  for (int i = 0; i < kNum; ++i) values.v[i] = p[i];
  return values;
}

template <int kNum, typename C>
__device__ inline void store_shared(C* p, const Values<C, kNum>& values) {
  if (is_pack<kNum>(p)) return store_values<kNum>(p, values);
#pragma unroll
  for (int i = 0; i < kNum; ++i) p[i] = values.v[i];
}

template <typename T>
constexpr int kPack = 16 / sizeof(T);

/// Returns whether rows of `columns` elements of type T at these addresses can
/// be read 16 bytes at a time.
template <typename T, typename... Pointers>
bool are_packs(int64_t columns, Pointers... pointers) {
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ... && true);
  return aligned && columns % kPack<T> == 0;
}

// ---- One row for a group of threads: a warp, or a whole block.

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 8;  // where a warp has a row

/// Calls function(integral_constant) with the number of threads for a row.
template <typename Function>
const char* with_threads(int64_t columns, Function&& function) {
  if (columns <= 1024) return function(std::integral_constant<int, kWarp>());
  if (columns <= 8192) return function(std::integral_constant<int, 256>());
  return function(std::integral_constant<int, 1024>());
}

/// Calls function(integral_constant) with the number of elements per access.
template <typename T, typename Function>
const char* with_packs(bool are_packs, Function&& function) {
  if (are_packs) return function(std::integral_constant<int, kPack<T>>());
  return function(std::integral_constant<int, 1>());
}

/// Calls function(T*) with a null pointer of the element type.
template <typename Function>
const char* with_type(Dtype dtype, Function&& function) {
  switch (dtype) {
    case Dtype::kDouble:
      return function(static_cast<double*>(nullptr));
    case Dtype::kHalf:
      return function(static_cast<__half*>(nullptr));
    case Dtype::kBFloat16:
      return function(static_cast<__nv_bfloat16*>(nullptr));
    case Dtype::kFloat:
      break;
  }
  return function(static_cast<float*>(nullptr));
}

template <int kThreads>
constexpr int kRowsPerBlock = kThreads == kWarp ? kWarpsPerBlock : 1;

struct RowLaunch {
  unsigned blocks;
  dim3 threads;
};

template <int kThreads>
RowLaunch row_launch(int64_t rows) {
  constexpr int kRows = kRowsPerBlock<kThreads>;
  return {static_cast<unsigned>((rows + kRows - 1) / kRows),
          dim3(kThreads, kRows)};
}

/// The row of this thread; rows past the end have no work.
template <int kThreads>
__device__ inline int64_t own_row() {
  return static_cast<int64_t>(blockIdx.x) * kRowsPerBlock<kThreads> +
         threadIdx.y;
}

struct Add {
  template <typename C>
  __device__ C operator()(C a, C b) const {
    return a + b;
  }
};
struct Larger {
  template <typename C>
  __device__ C operator()(C a, C b) const {
    return a > b ? a : b;
  }
};

/// Combines one value per thread of the row, in a fixed order; all threads get
/// the result.
template <int kThreads, typename C, typename Combine>
__device__ inline C over_row(C value, Combine combine) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  if constexpr (kThreads > kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ C values[kWarps];
    const int warp = threadIdx.x / kWarp;
    __syncthreads();  // the values before may still be read
    if (threadIdx.x % kWarp == 0) values[warp] = value;
    __syncthreads();
    value = values[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) value = combine(value, values[i]);
  }
  return value;
}

/// Calls body(j) for each j of the row that this thread works on, kNum
/// elements each, from `begin` on.
template <int kThreads, int kNum, typename Body>
__device__ inline void for_columns(int64_t begin, int64_t end, Body&& body) {
  for (int64_t j = begin + static_cast<int64_t>(threadIdx.x) * kNum; j < end;
       j += kThreads * kNum) {
    body(j);
  }
}

__device__ inline float exp_of(float x) { return expf(x); }
__device__ inline double exp_of(double x) { return exp(x); }
__device__ inline float rsqrt_of(float x) { return 1.0f / sqrtf(x); }
__device__ inline double rsqrt_of(double x) { return 1.0 / sqrt(x); }
__device__ inline float cdf_of(float x) { return normcdff(x); }
__device__ inline double cdf_of(double x) { return normcdf(x); }

// ---- Columns: each thread walks down some rows of its columns.

constexpr int kColumnRows = 8;  // rows that a block works on at once
constexpr int kColumnBlocks = 2112;

inline int64_t column_blocks(int64_t columns, int num) {
  return (columns + kWarp * num - 1) / (kWarp * num);
}

/// Returns the number of blocks down the rows, and of the partial sums that
/// they make: enough to fill a large GPU when a thread has four columns.
inline int64_t partial_rows(int64_t rows, int64_t columns) {
  const int64_t wanted = kColumnBlocks / column_blocks(columns, 4) + 1;
  const int64_t possible = (rows + kColumnRows - 1) / kColumnRows;
  return wanted < possible ? wanted : possible;
}

/// Adds what the threads of a block have summed for the same columns and
/// writes a row of partial sums.
template <int kNum, typename C>
__device__ inline void write_partial_sums(const C (&sums)[kNum], int64_t column,
                                          int64_t columns, C* partial_sums) {
  __shared__ C shared[kColumnRows][kWarp * kNum];
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    shared[threadIdx.y][threadIdx.x * kNum + i] = sums[i];
  }
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    Values<C, kNum> totals = {};
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      for (int y = 0; y < kColumnRows; ++y) {
        totals.v[i] += shared[y][threadIdx.x * kNum + i];
      }
    }
    store_shared<kNum>(partial_sums + blockIdx.y * columns + column, totals);
  }
  __syncthreads();
}

}  // namespace smp::kernels::cuda
