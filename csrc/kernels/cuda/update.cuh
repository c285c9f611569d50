#pragma once

#include <cstdint>
#include <type_traits>

#include "csrc/kernels/cuda/chunks.cuh"
#include "csrc/kernels/cuda/fused.cuh"
#include "csrc/kernels/optimizers.h"

// Code that the updates of parameters share on a GPU. Numbers of the step are
// read on the device, so nothing waits for them.

namespace smp::kernels::cuda {

struct UpdateItem {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* copy;
  const float* step;
  int64_t num_elements;
  int64_t first_slot;  // of results, one per chunk
  int32_t idx;         // in the caller's list
  bool has_half_copy;  // else BF16
  bool is_aligned;     // for several elements at a time
};

using UpdateList = ChunkListOf<UpdateItem, has_long_lists() ? 160 : 30>;
static_assert(sizeof(UpdateList) <= kMaxListBytes, "must leave room");

/// Elements that a thread takes at a time.
template <typename C>
constexpr int kGroup = 16 / sizeof(C);

__device__ inline bool is_skipped(const UpdateScalars& scalars) {
  return scalars.found_inf != nullptr && *scalars.found_inf != 0;
}

__device__ inline double divisor_of(const UpdateScalars& scalars) {
  return scalars.divisor == nullptr ? 1 : *scalars.divisor;
}

/// Calls body(integral_constant, i) for the elements of this block, in groups
/// where the arrays are aligned.
template <typename C, typename Body>
__device__ inline void for_updates(const UpdateItem& item, Range range,
                                   Body&& body) {
  for_elements<kGroup<C>>(range, item.is_aligned, body);
}

template <int kNum, typename C>
__device__ inline void store_param(const UpdateItem& item, int64_t i,
                                   const Values<C, kNum>& p) {
  store_values<kNum>(static_cast<C*>(item.param) + i, p);
  if constexpr (sizeof(C) == 4) {
    if (item.copy == nullptr) return;
    if (item.has_half_copy) {
      store_values<kNum>(static_cast<__half*>(item.copy) + i, p);
    } else {
      store_values<kNum>(static_cast<__nv_bfloat16*>(item.copy) + i, p);
    }
  }
}

inline bool are_aligned(const UpdateArrays& arrays) {
  const int64_t bytes = arrays.dtype == Dtype::kDouble ? 8 : 4;
  const int64_t num = 16 / bytes;
  const auto is_aligned = [num](const void* p, int64_t element_bytes) {
    return reinterpret_cast<uintptr_t>(p) % (num * element_bytes) == 0;
  };
  const bool has_wide_grad =
      arrays.grad_dtype == Dtype::kFloat || arrays.grad_dtype == Dtype::kDouble;
  return is_aligned(arrays.param, bytes) && is_aligned(arrays.exp_avg, bytes) &&
         is_aligned(arrays.exp_avg_sq, bytes) &&
         is_aligned(arrays.grad, has_wide_grad ? bytes : 2) &&
         is_aligned(arrays.copy, 2);
}

inline UpdateItem item_of(const UpdateArrays& arrays, int64_t idx,
                          int64_t first_slot) {
  return {arrays.param,
          arrays.grad,
          arrays.exp_avg,
          arrays.exp_avg_sq,
          arrays.copy,
          arrays.step,
          arrays.num_elements,
          first_slot,
          static_cast<int32_t>(idx),
          arrays.copy_dtype == Dtype::kHalf,
          are_aligned(arrays)};
}

/// Calls launch(C*, G*, list, num_blocks), with null pointers of the types of
/// parameters and gradients, for the chunks of each pair of these types.
template <typename Launch>
const char* for_each_update_list(const UpdateArrays* arrays, int64_t num_arrays,
                                 Launch&& launch) {
  const auto run = [&](Dtype dtype, Dtype grad_dtype, auto* c, auto* g) {
    int64_t slot = 0;
    return for_each_chunk_list<UpdateList>(
        num_arrays,
        [&](int64_t i, UpdateItem& item) {
          item = item_of(arrays[i], i, slot);
          slot += num_chunks(arrays[i].num_elements);
          return arrays[i].dtype == dtype && arrays[i].grad_dtype == grad_dtype;
        },
        [&](const UpdateList& list, int num_blocks) {
          launch(c, g, list, num_blocks);
          return error_text(cudaGetLastError());
        });
  };
  float* c = nullptr;
  if (const char* error = run(Dtype::kFloat, Dtype::kFloat, c, c)) return error;
  if (const char* error =
          run(Dtype::kFloat, Dtype::kHalf, c, static_cast<__half*>(nullptr))) {
    return error;
  }
  if (const char* error = run(Dtype::kFloat, Dtype::kBFloat16, c,
                              static_cast<__nv_bfloat16*>(nullptr))) {
    return error;
  }
  double* wide = nullptr;
  return run(Dtype::kDouble, Dtype::kDouble, wide, wide);
}

/// Adds 1 to the steps unless the update is skipped.
const char* count_steps(const UpdateArrays* arrays, int64_t num_arrays,
                        const UpdateScalars& scalars, cudaStream_t stream);

}  // namespace smp::kernels::cuda
