#include "csrc/kernels/loss_scale.h"

#include "csrc/kernels/cuda/chunks.cuh"

namespace smp::kernels::cuda {

namespace {

__global__ void move_loss_scale_kernel(LossScaleRule rule,
                                       const double* found_inf,
                                       LossScaleState* state) {
  kernels::move_loss_scale(rule, *found_inf != 0, state);
}

}  // namespace

const char* move_loss_scale(const LossScaleRule& rule, const double* found_inf,
                            LossScaleState* state, void* stream) {
  move_loss_scale_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
      rule, found_inf, state);
  return error_text(cudaGetLastError());
}

}  // namespace smp::kernels::cuda
