#pragma once

#include <cstdint>

#include "csrc/kernels/cuda/chunks.cuh"

// Results of chunks, one slot each, those of an array behind each other; and
// their totals per array.

namespace smp::kernels::cuda {

/// The first slot of each array of a launch, and the end of the last one's.
struct SlotList {
  static constexpr int kMaxArrays = 400;
  int64_t first[kMaxArrays + 1];
};

struct TakeSum {
  __device__ double operator()(double a, double b) const { return a + b; }
};

struct TakeMax {
  // NaN stays.
  __device__ double operator()(double a, double b) const {
    return a > b || a != a ? a : b;
  }
};

constexpr int kSlotThreads = 128;

/// Combines in block b the slots of array b, in a fixed order.
template <typename Combine>
__global__ void combine_slots_kernel(SlotList list, const double* slots,
                                     double* results) {
  const Combine combine;
  __shared__ double values[kSlotThreads];
  double value = 0;
  for (int64_t i = list.first[blockIdx.x] + threadIdx.x;
       i < list.first[blockIdx.x + 1]; i += kSlotThreads) {
    value = combine(value, slots[i]);
  }
  values[threadIdx.x] = value;
  __syncthreads();
  for (int half = kSlotThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      values[threadIdx.x] =
          combine(values[threadIdx.x], values[threadIdx.x + half]);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) results[blockIdx.x] = values[0];
}

/// Computes the totals of all arrays: `results[i]` from the slots of array i.
/// @param num_slots  num_slots(i): number of slots of array i
template <typename Combine, typename NumSlots>
const char* combine_slots(int64_t num_arrays, NumSlots&& num_slots,
                          const double* slots, double* results,
                          cudaStream_t stream) {
  int64_t slot = 0;
  for (int64_t begin = 0; begin < num_arrays; begin += SlotList::kMaxArrays) {
    SlotList list;
    int count = 0;
    for (; count < SlotList::kMaxArrays && begin + count < num_arrays;
         ++count) {
      list.first[count] = slot;
      slot += num_slots(begin + count);
    }
    list.first[count] = slot;
    combine_slots_kernel<Combine>
        <<<count, kSlotThreads, 0, stream>>>(list, slots, results + begin);
    if (const char* error = error_text(cudaGetLastError())) return error;
  }
  return nullptr;
}

}  // namespace smp::kernels::cuda
