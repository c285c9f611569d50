#pragma once

#include <cstdint>

#include "csrc/kernels/counter_hash.h"
#include "csrc/kernels/multi_array.h"

// Fused element-wise operators on matrices whose rows share a bias. Raw
// pointers only: callers check and allocate. "Compute" is double for kDouble
// and float otherwise.

namespace smp::kernels {

/// y = gelu(x + bias)
struct BiasGelu {
  const void* x = nullptr;     // [rows, columns]
  const void* bias = nullptr;  // Compute [columns]; null: 0
  const void* dy = nullptr;    // [rows, columns], for backward
  void* result = nullptr;      // y, or dx in backward
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  bool is_tanh = false;  // the approximation with tanh
  Dtype dtype = Dtype::kFloat;
};

/// y = residual + dropout(x + bias)
struct BiasDropoutResidual {
  const void* x = nullptr;         // [rows, columns]
  const void* bias = nullptr;      // Compute [columns]; null: 0
  const void* residual = nullptr;  // of y's dtype; null: 0
  void* y = nullptr;               // [rows, columns]
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  Dropout dropout;
  Dtype dtype = Dtype::kFloat;    // of x
  Dtype y_dtype = Dtype::kFloat;  // `dtype`, or kFloat for 16-bit x
};

struct BiasDropoutResidualBackward {
  const void* dy = nullptr;  // [rows, columns]
  void* dx = nullptr;        // [rows, columns]
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  Dropout dropout;
  Dtype dtype = Dtype::kFloat;    // of dx
  Dtype y_dtype = Dtype::kFloat;  // of dy
};

/// Rotation of pairs of features. The pair p of a head is features
/// (p, p + num_pairs), or (2 p, 2 p + 1) if interleaved; later features are
/// copied. x may be a view whose features lie together; y is contiguous.
struct Rotary {
  const void* x = nullptr;    // [batch, length, heads, head_size]
  const void* cos = nullptr;  // Compute [batch or 1, length, num_pairs]
  const void* sin = nullptr;  //
  void* y = nullptr;          // [batch, length, heads, head_size]
  int64_t batch_size = 0;
  int64_t length = 0;
  int64_t num_heads = 0;
  int64_t head_size = 0;
  int64_t num_pairs = 0;
  int64_t batch_stride = 0;  // of x, in elements
  int64_t length_stride = 0;
  int64_t head_stride = 0;
  bool is_table_per_sample = false;
  bool is_interleaved = false;
  bool is_inverse = false;  // rotates back: the backward
  Dtype dtype = Dtype::kFloat;
};

/// Functions on all rows, queued on `stream`. They return nullptr, or the text
/// of the error. `partial_sums`: Compute [partial rows, columns], sums of dbias
/// over some rows each; null: not wanted.
namespace cuda {

int64_t column_partial_rows(int64_t num_rows, int64_t num_columns);

const char* bias_gelu_forward(const BiasGelu& gelu, void* stream);
const char* bias_gelu_backward(const BiasGelu& gelu, void* partial_sums,
                               void* stream);
const char* bias_dropout_residual_forward(const BiasDropoutResidual& op,
                                          void* stream);
const char* bias_dropout_residual_backward(
    const BiasDropoutResidualBackward& op, void* partial_sums, void* stream);
const char* rotary(const Rotary& rotary, void* stream);

}  // namespace cuda

}  // namespace smp::kernels
