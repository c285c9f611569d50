#pragma once

#include <cstdint>
#include <string_view>

#include "csrc/kernels/compact_state.h"
#include "csrc/kernels/elementwise.h"
#include "csrc/kernels/multi_array.h"
#include "csrc/kernels/norm.h"
#include "csrc/kernels/optimizers.h"
#include "csrc/kernels/softmax.h"

namespace smp::kernels::cpu {

/// The fused kernels, compiled for one instruction set. The last two integers
/// are the rows [begin, end) to compute, or the elements of an array. Elements
/// of 16 bits are computed in float and rounded to nearest even. `dweight` and
/// `dbias` are Compute [columns], added to; null: not wanted.
struct FusedTable {
  void (*norm_forward)(const Norm&, int64_t, int64_t);
  void (*norm_backward)(const NormBackward&, int64_t, int64_t, void* dweight,
                        void* dbias);
  void (*bias_gelu_forward)(const BiasGelu&, int64_t, int64_t);
  void (*bias_gelu_backward)(const BiasGelu&, int64_t, int64_t, void* dbias);
  void (*bias_dropout_residual_forward)(const BiasDropoutResidual&, int64_t,
                                        int64_t);
  void (*bias_dropout_residual_backward)(const BiasDropoutResidualBackward&,
                                         int64_t, int64_t, void* dbias);
  /// A row is a pair (sample, position).
  void (*rotary)(const Rotary&, int64_t, int64_t);
  void (*softmax_forward)(const ScaledMaskedSoftmax&, int64_t, int64_t);
  void (*softmax_backward)(const ScaledMaskedSoftmaxBackward&, int64_t,
                           int64_t);
  void (*cross_entropy_forward)(const CrossEntropy&, int64_t, int64_t);
  void (*cross_entropy_backward)(const CrossEntropyBackward&, int64_t, int64_t);

  /// Returns the sum in double precision, in an order that only the number of
  /// elements and the instruction set decide.
  double (*sum_of_squares)(const Array&, int64_t, int64_t);
  /// Returns the largest absolute value, 0 for no elements; NaN if there is
  /// one.
  double (*max_abs)(const Array&, int64_t, int64_t);
  void (*scale)(const Array&, double factor, int64_t, int64_t);

  // Updates of one parameter. The caller handles `step` and the scalars:
  // factors are those of the current update.

  /// Updates moments and parameter: p -= lr * u.
  void (*adam)(const UpdateArrays&, const AdamFactors&, double lr, int64_t,
               int64_t);
  /// Updates arrays in fewer bytes likewise; the elements [begin, end) are
  /// whole blocks of moments.
  void (*adam_compact)(const CompactArrays&, const AdamFactors&, double lr,
                       int64_t, int64_t);
  /// Updates the moments only.
  /// @param sums  two numbers: the sums of squares of p and of u
  void (*lamb_moments)(const UpdateArrays&, const AdamFactors&, int64_t,
                       int64_t, double* sums);
  /// Computes p -= rate * u from the current moments; gradients are not read.
  void (*lamb_apply)(const UpdateArrays&, const AdamFactors&, double rate,
                     int64_t, int64_t);
  void (*momentum)(const UpdateArrays&, const MomentumFactors&, int64_t,
                   int64_t);
};

const FusedTable& portable_table();
const FusedTable& avx2_table();
const FusedTable& avx512_table();
const FusedTable& avx512_bf16_table();

/// Returns the tables that this processor can run, the fastest first; null
/// after the last.
const FusedTable* const* usable_tables();

/// Returns the fastest usable table within a value of PyTorch's variable
/// ATEN_CPU_CAPABILITY ("default", "avx2", "avx512"), which the kernels follow.
const FusedTable& table_for(std::string_view capability);

}  // namespace smp::kernels::cpu

namespace smp::kernels {

/// Returns the table for this process.
__attribute__((visibility("default"))) const cpu::FusedTable& fused();

}  // namespace smp::kernels
