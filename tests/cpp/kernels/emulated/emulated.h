#pragma once

#include <cstdint>
#include <vector>

#include "csrc/kernels/elementwise.h"
#include "csrc/kernels/multi_array.h"
#include "csrc/kernels/norm.h"
#include "csrc/kernels/optimizers.h"
#include "csrc/kernels/softmax.h"
#include "tests/cpp/kernels/emulated/fibers.h"

// CUDA kernels in the emulation, called as those of the CPU are.

namespace smp::kernels::emulated {

/// Fails the test with the text of what went wrong, if there is one.
void expect_launched(const char* error);

/// Sums over the partial sums, of which each has to be written; added to
/// dweight and dbias, which may be null.
void norm_backward(const NormBackward& op, void* dweight, void* dbias);
void bias_gelu_backward(const BiasGelu& op, void* dbias);
void bias_dropout_residual_backward(const BiasDropoutResidualBackward& op,
                                    void* dbias);

Array part_of(const Array& array, int64_t begin, int64_t end);

using Reduction = const char* (*)(const Array*, int64_t, double*, double*,
                                  void*);
/// One number per array.
std::vector<double> results(Reduction reduction, const Array* arrays,
                            int64_t num_arrays);

}  // namespace smp::kernels::emulated
