#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tests/cpp/kernels/emulated/fibers.h"
#include "tests/cpp/kernels/emulated/races.h"

// Replaces the CUDA runtime where the kernels are compiled for the host. It has
// what they use; whatever else a kernel needs is added here.

#define __global__
#define __device__
#define __host__
#define __shared__ static  // one block runs at a time
#define __launch_bounds__(...)
#define __grid_constant__ &  // fibers share a parameter, too

// Values of a toolkit with large kernel parameters.
#define CUDART_VERSION 13000
#define __CUDA_ARCH_LIST__ 900

using cudaStream_t = void*;
using cudaError_t = const char*;  // what went wrong
constexpr cudaError_t cudaSuccess = nullptr;

inline cudaError_t cudaGetLastError() {
  return smp::kernels::emulated::take_error();
}
inline const char* cudaGetErrorString(cudaError_t error) { return error; }

inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

using smp::kernels::emulated::blockDim;
using smp::kernels::emulated::blockIdx;
using smp::kernels::emulated::dim3;
using smp::kernels::emulated::gridDim;
using smp::kernels::emulated::threadIdx;

inline void __syncthreads(const char* file = __builtin_FILE(),
                          int line = __builtin_LINE()) {
  smp::kernels::emulated::wait_for_block({file, line});
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask,
                  const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a register, or two");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = smp::kernels::emulated::exchange_in_warp(
      mask, bits, smp::kernels::emulated::lane() ^ lane_mask, {file, line});
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  return smp::kernels::emulated::vote_in_warp(mask, predicate != 0,
                                              {file, line});
}

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
// Stores that stay in the caches, as any store does.
inline void __stwb(uint4* p, uint4 value) { *p = value; }
inline void __stwb(uint2* p, uint2 value) { *p = value; }

inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118f); }
inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
