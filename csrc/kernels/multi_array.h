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

/// Two arrays of one length and dtype that do not overlap.
struct ArrayPair {
  void* y = nullptr;
  const void* x = nullptr;
  int64_t num_elements = 0;
  Dtype dtype = Dtype::kFloat;
};

/// The reference. Sums are taken in double precision and in a fixed order;
/// 16-bit elements are computed in float and rounded to nearest even.
namespace cpu {

double sum_of_squares(const Array* arrays, int64_t num_arrays);

/// x *= factor
void scale(const Array* arrays, int64_t num_arrays, double factor);

/// y += a * x
void add_scaled(const ArrayPair* pairs, int64_t num_pairs, double a);

}  // namespace cpu

/// The same on a GPU. Arrays live on the device that is current; work is queued
/// on `stream` (a cudaStream_t) and not waited for. Each function returns
/// nullptr, or the text of what went wrong.
namespace cuda {

/// Number of doubles that `sum_of_squares` needs as scratch memory.
int64_t num_partial_sums(const Array* arrays, int64_t num_arrays);

/// Writes the sum to `result`. Elements are added in float inside a thread and
/// in double across threads, in a fixed order, so equal runs give equal bits.
/// @param partial_sums  device memory, `num_partial_sums` doubles
/// @param result  device memory, one double
const char* sum_of_squares(const Array* arrays, int64_t num_arrays,
                           double* partial_sums, double* result, void* stream);

/// x *= *factor
/// @param factor  device memory, one double
const char* scale(const Array* arrays, int64_t num_arrays, const double* factor,
                  void* stream);

/// y += a * x
const char* add_scaled(const ArrayPair* pairs, int64_t num_pairs, double a,
                       void* stream);

}  // namespace cuda

}  // namespace smp::kernels
