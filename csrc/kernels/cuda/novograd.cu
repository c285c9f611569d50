#include "csrc/kernels/cuda/update.cuh"

namespace smp::kernels::cuda {

namespace {

constexpr int kMaxNorms = 128;

// The running norms of some arrays, and their places in the caller's list.
struct NormList {
  struct {
    void* running;
    const float* step;
    bool is_double;
  } items[kMaxNorms];
};

__global__ void running_norms_kernel(NormList list, int num_norms,
                                     NovoGradOptions options,
                                     UpdateScalars scalars,
                                     const double* norms) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= num_norms || is_skipped(scalars)) return;
  const auto& item = list.items[i];
  const double old = item.is_double ? *static_cast<double*>(item.running)
                                    : *static_cast<float*>(item.running);
  const double now =
      running_norm(options, *item.step, old, norms[i], divisor_of(scalars));
  if (item.is_double) {
    *static_cast<double*>(item.running) = now;
  } else {
    *static_cast<float*>(item.running) = static_cast<float>(now);
  }
}

template <typename C, typename G>
__global__ void momentum_kernel(SMP_LIST(UpdateList) list,
                                NovoGradOptions options,
                                UpdateScalars scalars) {
  if (is_skipped(scalars)) return;
  const UpdateItem& item = list.items[list.array_idxs[blockIdx.x]];
  __shared__ MomentumFactors shared;
  if (threadIdx.x == 0) {
    shared = novograd_factors(options, *item.step,
                              *static_cast<const C*>(item.exp_avg_sq),
                              *scalars.lr, divisor_of(scalars));
  }
  __syncthreads();
  const C grad_factor = static_cast<C>(shared.grad_factor);
  const C l2 = static_cast<C>(shared.l2);
  const C beta1 = static_cast<C>(shared.beta1);
  const C grad_part = static_cast<C>(shared.grad_part);
  const C rate = static_cast<C>(shared.rate);
  const C decay = static_cast<C>(shared.decay);
  const C* param = static_cast<const C*>(item.param);
  const G* grad = static_cast<const G*>(item.grad);
  C* exp_avg = static_cast<C*>(item.exp_avg);
  for_updates<C>(item, block_range(list), [&](auto num, int64_t i) {
    constexpr int kNum = decltype(num)::value;
    auto p = load_values<kNum>(param + i);
    auto m = load_values<kNum>(exp_avg + i);
    const auto grads = load_values<kNum>(grad + i);
#pragma unroll
    for (int k = 0; k < kNum; ++k) {
      C g = grads.v[k] * grad_factor;
      if (l2 != 0) g += l2 * p.v[k];
      m.v[k] = beta1 * m.v[k] + grad_part * g;
      C u = m.v[k] * rate;
      if (decay != 0) u += decay * p.v[k];
      p.v[k] -= u;
    }
    store_values<kNum>(exp_avg + i, m);
    store_param<kNum>(item, i, p);
  });
}

const char* move_running_norms(const UpdateArrays* arrays, int64_t num_arrays,
                               const NovoGradOptions& options,
                               const UpdateScalars& scalars,
                               const double* norms, cudaStream_t stream) {
  for (int64_t begin = 0; begin < num_arrays; begin += kMaxNorms) {
    NormList list;
    int count = 0;
    for (; count < kMaxNorms && begin + count < num_arrays; ++count) {
      const UpdateArrays& a = arrays[begin + count];
      list.items[count] = {a.exp_avg_sq, a.step, a.dtype == Dtype::kDouble};
    }
    running_norms_kernel<<<1, kMaxNorms, 0, stream>>>(list, count, options,
                                                      scalars, norms + begin);
    if (const char* error = error_text(cudaGetLastError())) return error;
  }
  return nullptr;
}

}  // namespace

const char* novograd(const UpdateArrays* arrays, int64_t num_arrays,
                     const NovoGradOptions& options,
                     const UpdateScalars& scalars, const double* norms,
                     void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (const char* error =
          count_steps(arrays, num_arrays, scalars, cuda_stream)) {
    return error;
  }
  if (const char* error = move_running_norms(arrays, num_arrays, options,
                                             scalars, norms, cuda_stream)) {
    return error;
  }
  return for_each_update_list(
      arrays, num_arrays,
      [&](auto* c, auto* g, const UpdateList& list, int num_blocks) {
        using C = std::remove_pointer_t<decltype(c)>;
        using G = std::remove_pointer_t<decltype(g)>;
        momentum_kernel<C, G><<<num_blocks, kNumThreads, 0, cuda_stream>>>(
            list, options, scalars);
      });
}

}  // namespace smp::kernels::cuda
