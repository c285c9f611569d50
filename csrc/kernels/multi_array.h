#pragma once

#include <cstdint>

// Kernels over lists of arrays. Raw pointers only: callers check and allocate.
// This header is also read by the CUDA compiler, as C++17.

namespace smp::kernels {

enum class Dtype { kFloat, kDouble, kHalf, kBFloat16 };

/// Elements in one piece of memory, aligned to the element size.
struct Array {
  void* data = nullptr;
  int64_t num_elements = 0;
  Dtype dtype = Dtype::kFloat;
};

/// Functions on a GPU. Arrays live on the device that is current; work
/// is queued on `stream` (a cudaStream_t) and not waited for. Each function
/// returns nullptr, or the text of the error.
namespace cuda {

/// Returns the number of doubles that `sums_of_squares` and `max_abs` need as
/// scratch.
int64_t num_partials(const Array* arrays, int64_t num_arrays);

/// Writes the sum of each array, in double and in a fixed order.
/// @param partials  device memory, `num_partials` doubles
/// @param results  device memory, [arrays]
const char* sums_of_squares(const Array* arrays, int64_t num_arrays,
                            double* partials, double* results, void* stream);

/// Writes the largest absolute value of each array; NaN if there is one.
const char* max_abs(const Array* arrays, int64_t num_arrays, double* partials,
                    double* results, void* stream);

/// Computes x *= *factor.
/// @param factor  device memory, one double
const char* scale(const Array* arrays, int64_t num_arrays, const double* factor,
                  void* stream);

}  // namespace cuda

}  // namespace smp::kernels
