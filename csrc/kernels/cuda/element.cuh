#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "csrc/kernels/multi_array.h"

namespace smp::kernels::cuda {

/// The arithmetic of a dtype's elements: load to `Compute`, store from it.
template <typename T>
struct Element {
  using Compute = T;
  __device__ static T load(T value) { return value; }
  __device__ static T store(T value) { return value; }
};

template <>
struct Element<__half> {
  using Compute = float;
  __device__ static float load(__half value) { return __half2float(value); }
  __device__ static __half store(float value) { return __float2half_rn(value); }
};

template <>
struct Element<__nv_bfloat16> {
  using Compute = float;
  __device__ static float load(__nv_bfloat16 value) {
    return __bfloat162float(value);
  }
  __device__ static __nv_bfloat16 store(float value) {
    return __float2bfloat16_rn(value);
  }
};

/// Calls `function(T*)` (a null pointer, for its type) for each dtype in turn.
template <typename Function>
const char* for_each_dtype(Function&& function) {
  if (const char* error = function(Dtype::kFloat, (float*)nullptr)) {
    return error;
  }
  if (const char* error = function(Dtype::kDouble, (double*)nullptr)) {
    return error;
  }
  if (const char* error = function(Dtype::kHalf, (__half*)nullptr)) {
    return error;
  }
  return function(Dtype::kBFloat16, (__nv_bfloat16*)nullptr);
}

}  // namespace smp::kernels::cuda
