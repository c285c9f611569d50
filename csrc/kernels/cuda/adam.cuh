#pragma once

#include "csrc/kernels/cuda/update.cuh"

// The arithmetic of Adam that LAMB shares.

namespace smp::kernels::cuda {

__device__ inline float root_of(float x) { return sqrtf(x); }
__device__ inline double root_of(double x) { return sqrt(x); }

/// Returns the factors of a parameter's update, computed by one thread of the
/// block. All threads call this.
__device__ inline AdamFactors block_factors(const AdamOptions& options,
                                            const UpdateItem& item,
                                            const UpdateScalars& scalars) {
  __shared__ AdamFactors factors;
  if (threadIdx.x == 0) {
    factors = adam_factors(options, *item.step, divisor_of(scalars));
  }
  __syncthreads();
  return factors;
}

template <typename C>
struct Factors {
  __device__ Factors(const AdamFactors& f, double rate)
      : grad_factor(static_cast<C>(f.grad_factor)),
        l2(static_cast<C>(f.l2)),
        beta1(static_cast<C>(f.beta1)),
        grad_part(static_cast<C>(f.grad_part)),
        beta2(static_cast<C>(f.beta2)),
        square_part(static_cast<C>(f.square_part)),
        step_size(static_cast<C>(rate * f.step_size)),
        root_factor(static_cast<C>(f.root_factor)),
        eps(static_cast<C>(f.eps)),
        decay(static_cast<C>(rate * f.decay)) {}

  __device__ void move(C g, C p, C* m, C* v) const {
    g *= grad_factor;
    if (l2 != 0) g += l2 * p;
    *m = beta1 * *m + grad_part * g;
    *v = beta2 * *v + square_part * g * g;
  }

  // rate * u
  __device__ C update(C p, C m, C v) const {
    C u = m * step_size / (root_of(v) * root_factor + eps);
    if (decay != 0) u += decay * p;
    return u;
  }

  C grad_factor, l2, beta1, grad_part, beta2, square_part;
  C step_size, root_factor, eps, decay;
};

}  // namespace smp::kernels::cuda
