#pragma once

#include <cstdint>

#include "csrc/kernels/multi_array.h"

// Layer norm and RMS norm over the rows of a matrix. Raw pointers only: callers
// check and allocate. "Compute" is double for kDouble and float otherwise.

namespace smp::kernels {

/// y = (x - mean) * rstd * weight + bias; RMS norm has no mean and no bias.
struct Norm {
  const void* x = nullptr;       // [rows, columns]
  const void* weight = nullptr;  // Compute [columns]; null: 1
  const void* bias = nullptr;    // Compute [columns]; null: 0
  void* y = nullptr;             // as x
  void* mean = nullptr;          // Compute [rows]; null for RMS norm
  void* rstd = nullptr;          // Compute [rows]
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  double eps = 0;
  bool is_rms = false;
  Dtype dtype = Dtype::kFloat;
};

struct NormBackward {
  const void* dy = nullptr;      // [rows, columns]
  const void* x = nullptr;       // [rows, columns]
  const void* mean = nullptr;    // as forward wrote them
  const void* rstd = nullptr;    //
  const void* weight = nullptr;  // Compute [columns]; null: 1
  void* dx = nullptr;            // [rows, columns]; null: not wanted
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  bool is_rms = false;
  Dtype dtype = Dtype::kFloat;
};

/// Functions on all rows, queued on `stream`. They return nullptr, or the text
/// of the error.
namespace cuda {

const char* norm_forward(const Norm& norm, void* stream);

/// Returns the number of rows that `partial_sums` of `norm_backward` needs.
int64_t norm_partial_rows(const NormBackward& norm);

/// @param partial_sums  Compute [2, partial rows, columns]: sums of dweight and
///     of dbias over some rows each; null: not wanted
const char* norm_backward(const NormBackward& norm, void* partial_sums,
                          void* stream);

}  // namespace cuda

}  // namespace smp::kernels
