#include "csrc/kernels/compact_state.h"
#include "csrc/kernels/elementwise.h"
#include "csrc/kernels/loss_scale.h"
#include "csrc/kernels/multi_array.h"
#include "csrc/kernels/norm.h"
#include "csrc/kernels/optimizers.h"
#include "csrc/kernels/softmax.h"

// Replaces cuda/ where there is no CUDA compiler.

namespace smp::kernels::cuda {

namespace {

constexpr const char* kNoCuda =
    "this build of smp has no CUDA kernels; rebuild with nvcc on PATH and "
    "SMP_CUDA=on, or keep the tensors on the CPU";

}  // namespace

int64_t num_partials(const Array*, int64_t) { return 0; }

const char* sums_of_squares(const Array*, int64_t, double*, double*, void*) {
  return kNoCuda;
}

const char* max_abs(const Array*, int64_t, double*, double*, void*) {
  return kNoCuda;
}

const char* scale(const Array*, int64_t, const double*, void*) {
  return kNoCuda;
}

const char* norm_forward(const Norm&, void*) { return kNoCuda; }

int64_t norm_partial_rows(const NormBackward&) { return 0; }

const char* norm_backward(const NormBackward&, void*, void*) { return kNoCuda; }

int64_t column_partial_rows(int64_t, int64_t) { return 0; }

const char* bias_gelu_forward(const BiasGelu&, void*) { return kNoCuda; }

const char* bias_gelu_backward(const BiasGelu&, void*, void*) {
  return kNoCuda;
}

const char* bias_dropout_residual_forward(const BiasDropoutResidual&, void*) {
  return kNoCuda;
}

const char* bias_dropout_residual_backward(const BiasDropoutResidualBackward&,
                                           void*, void*) {
  return kNoCuda;
}

const char* rotary(const Rotary&, void*) { return kNoCuda; }

const char* softmax_forward(const ScaledMaskedSoftmax&, void*) {
  return kNoCuda;
}

const char* softmax_backward(const ScaledMaskedSoftmaxBackward&, void*) {
  return kNoCuda;
}

const char* cross_entropy_forward(const CrossEntropy&, void*) {
  return kNoCuda;
}

const char* cross_entropy_backward(const CrossEntropyBackward&, void*) {
  return kNoCuda;
}

const char* adam(const UpdateArrays*, int64_t, const AdamOptions&,
                 const UpdateScalars&, void*) {
  return kNoCuda;
}

const char* adam_compact(const CompactArrays*, int64_t, const AdamOptions&,
                         const UpdateScalars&, void*) {
  return kNoCuda;
}

int64_t num_lamb_partial_sums(const UpdateArrays*, int64_t) { return 0; }

const char* lamb_moments(const UpdateArrays*, int64_t, const AdamOptions&,
                         const UpdateScalars&, double*, double*, void*) {
  return kNoCuda;
}

const char* lamb_apply(const UpdateArrays*, int64_t, const LambOptions&,
                       const UpdateScalars&, const double*, void*) {
  return kNoCuda;
}

const char* novograd(const UpdateArrays*, int64_t, const NovoGradOptions&,
                     const UpdateScalars&, const double*, void*) {
  return kNoCuda;
}

const char* move_loss_scale(const LossScaleRule&, const double*,
                            LossScaleState*, void*) {
  return kNoCuda;
}

}  // namespace smp::kernels::cuda
