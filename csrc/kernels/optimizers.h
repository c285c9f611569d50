#pragma once

#include <cstdint>

#include "csrc/kernels/counter_hash.h"
#include "csrc/kernels/multi_array.h"

// Updates of parameters. Raw pointers only: callers check and allocate.
// "Compute" is the dtype of the parameter, float or double. Also read by the
// CUDA compiler.

namespace smp::kernels {

/// A parameter and the state that its optimizer keeps, arrays of one length.
struct UpdateArrays {
  void* param = nullptr;       // Compute
  const void* grad = nullptr;  // Compute, or 16 bit for a float parameter
  void* exp_avg = nullptr;     // Compute
  void* exp_avg_sq = nullptr;  // Compute; of NovoGrad one number
  void* copy = nullptr;        // 16 bit, of a float parameter; null: none
  float* step = nullptr;       // one number: updates so far
  int64_t num_elements = 0;
  Dtype dtype = Dtype::kFloat;  // kFloat or kDouble
  Dtype grad_dtype = Dtype::kFloat;
  Dtype copy_dtype = Dtype::kBFloat16;
  bool bypasses_cache = false;  // CPU: the copy is written past the caches
};

/// Numbers that all parameters of a call share, each one number where the
/// arrays are.
struct UpdateScalars {
  const double* lr = nullptr;
  const double* divisor = nullptr;    // of gradients; null: 1
  const double* found_inf = nullptr;  // not 0: nothing changes; null: 0
};

struct AdamOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool is_decoupled = true;  // weight decay stays out of the moments
  bool has_bias_correction = true;
  bool has_grad_averaging = true;  // gradients enter with 1 - beta1, else 1
};

struct LambOptions {
  AdamOptions adam;
  bool always_has_ratio = false;  // else only with weight decay
};

struct NovoGradOptions {
  /// Options of Adam. If not `is_decoupled`, normalised gradients and weight
  /// decay enter the moment.
  AdamOptions adam;
  bool is_max_norm = false;  // else the root of the sum of squares
  bool starts_at_zero = false;
};

/// g = grad * grad_factor + l2 * p
/// m = beta1 * m + grad_part * g
/// v = beta2 * v + square_part * g^2
/// u = step_size * m / (sqrt(v) * root_factor + eps) + decay * p
struct AdamFactors {
  double grad_factor;
  double l2;
  double beta1;
  double grad_part;
  double beta2;
  double square_part;
  double step_size;    // 1 / (1 - beta1^step)
  double root_factor;  // 1 / sqrt(1 - beta2^step)
  double eps;
  double decay;
};

/// g = grad * grad_factor + l2 * p;  m = beta1 * m + grad_part * g
/// p -= rate * m + decay * p
struct MomentumFactors {
  double grad_factor;
  double l2;
  double beta1;
  double grad_part;
  double rate;
  double decay;
};

/// Returns the factors of an update.
/// @param step  number of this update, the first is 1
SMP_HOST_DEVICE SMP_INLINED AdamFactors adam_factors(const AdamOptions& options,
                                                     double step,
                                                     double divisor) {
  AdamFactors f;
  f.grad_factor = 1 / divisor;
  f.l2 = options.is_decoupled ? 0 : options.weight_decay;
  f.beta1 = options.beta1;
  f.grad_part = options.has_grad_averaging ? 1 - options.beta1 : 1;
  f.beta2 = options.beta2;
  f.square_part = 1 - options.beta2;
  f.step_size = 1;
  f.root_factor = 1;
  if (options.has_bias_correction) {
    f.step_size = 1 / (1 - __builtin_pow(options.beta1, step));
    f.root_factor = 1 / __builtin_sqrt(1 - __builtin_pow(options.beta2, step));
  }
  f.eps = options.eps;
  f.decay = options.is_decoupled ? options.weight_decay : 0;
  return f;
}

/// Returns the length of LAMB's step, in learning rates, from the sums of
/// squares of a parameter and of its update.
SMP_HOST_DEVICE SMP_INLINED double trust_ratio(const LambOptions& options,
                                               double param_squares,
                                               double update_squares) {
  const bool wants = options.always_has_ratio || options.adam.weight_decay != 0;
  if (!wants || param_squares == 0 || update_squares == 0) return 1;
  return __builtin_sqrt(param_squares / update_squares);
}

/// Returns the second moment of NovoGrad: a running norm of the gradient.
/// @param old  moment before update number `step`
/// @param norm  norm of this update's gradient, not divided yet
SMP_HOST_DEVICE SMP_INLINED double running_norm(const NovoGradOptions& options,
                                                double step, double old,
                                                double norm, double divisor) {
  const double beta2 = options.adam.beta2;
  norm /= divisor;
  if (step <= 1) {
    if (!options.starts_at_zero) return norm;
    old = 0;
  }
  if (options.is_max_norm) return beta2 * old + (1 - beta2) * norm;
  return __builtin_sqrt(beta2 * old * old + (1 - beta2) * norm * norm);
}

SMP_HOST_DEVICE SMP_INLINED MomentumFactors
novograd_factors(const NovoGradOptions& options, double step, double norm,
                 double lr, double divisor) {
  const AdamFactors adam = adam_factors(options.adam, step, divisor);
  const double denominator = norm * adam.root_factor + adam.eps;
  const bool is_decoupled = options.adam.is_decoupled;
  MomentumFactors f;
  f.grad_factor =
      is_decoupled ? adam.grad_factor : adam.grad_factor / denominator;
  f.l2 = adam.l2;
  f.beta1 = adam.beta1;
  f.grad_part = adam.grad_part;
  f.rate = lr * adam.step_size / (is_decoupled ? denominator : 1);
  f.decay = lr * adam.decay;
  return f;
}

/// Functions on all arrays, queued on `stream` and not waited for. They return
/// nullptr, or the text of the error. `adam`, `lamb_moments` and `novograd`
/// count the step.
namespace cuda {

const char* adam(const UpdateArrays* arrays, int64_t num_arrays,
                 const AdamOptions& options, const UpdateScalars& scalars,
                 void* stream);

/// Returns the number of doubles that `lamb_moments` needs as scratch memory.
int64_t num_lamb_partial_sums(const UpdateArrays* arrays, int64_t num_arrays);

/// @param sums  device memory, [2, arrays]: sums of squares of parameters and
///     of their updates; 0 where nothing is to change
const char* lamb_moments(const UpdateArrays* arrays, int64_t num_arrays,
                         const AdamOptions& options,
                         const UpdateScalars& scalars, double* partial_sums,
                         double* sums, void* stream);

/// @param sums  device memory, [2, arrays], over all parts of the parameters
const char* lamb_apply(const UpdateArrays* arrays, int64_t num_arrays,
                       const LambOptions& options, const UpdateScalars& scalars,
                       const double* sums, void* stream);

/// @param norms  device memory, [arrays]: norms of the gradients, not divided
const char* novograd(const UpdateArrays* arrays, int64_t num_arrays,
                     const NovoGradOptions& options,
                     const UpdateScalars& scalars, const double* norms,
                     void* stream);

}  // namespace cuda

}  // namespace smp::kernels
