#include "csrc/kernels/cuda/adam.cuh"

namespace smp::kernels::cuda {

namespace {

constexpr int kMaxSteps = 400;

struct StepList {
  float* steps[kMaxSteps];
};

__global__ void count_steps_kernel(StepList list, int num_steps,
                                   UpdateScalars scalars) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < num_steps && !is_skipped(scalars)) *list.steps[i] += 1;
}

template <typename C, typename G>
__global__ void adam_kernel(SMP_LIST(UpdateList) list, AdamOptions options,
                            UpdateScalars scalars) {
  if (is_skipped(scalars)) return;
  const UpdateItem& item = list.items[list.array_idxs[blockIdx.x]];
  const Factors<C> f(block_factors(options, item, scalars), *scalars.lr);
  const C* param = static_cast<const C*>(item.param);
  const G* grad = static_cast<const G*>(item.grad);
  C* exp_avg = static_cast<C*>(item.exp_avg);
  C* exp_avg_sq = static_cast<C*>(item.exp_avg_sq);
  for_updates<C>(item, block_range(list), [&](auto num, int64_t i) {
    constexpr int kNum = decltype(num)::value;
    auto p = load_values<kNum>(param + i);
    auto m = load_values<kNum>(exp_avg + i);
    auto v = load_values<kNum>(exp_avg_sq + i);
    const auto g = load_values<kNum>(grad + i);
#pragma unroll
    for (int k = 0; k < kNum; ++k) {
      f.move(g.v[k], p.v[k], &m.v[k], &v.v[k]);
      p.v[k] -= f.update(p.v[k], m.v[k], v.v[k]);
    }
    store_values<kNum>(exp_avg + i, m);
    store_values<kNum>(exp_avg_sq + i, v);
    store_param<kNum>(item, i, p);
  });
}

}  // namespace

const char* count_steps(const UpdateArrays* arrays, int64_t num_arrays,
                        const UpdateScalars& scalars, cudaStream_t stream) {
  constexpr int kThreads = 128;
  for (int64_t begin = 0; begin < num_arrays; begin += kMaxSteps) {
    StepList list;
    int count = 0;
    for (; count < kMaxSteps && begin + count < num_arrays; ++count) {
      list.steps[count] = arrays[begin + count].step;
    }
    count_steps_kernel<<<(count + kThreads - 1) / kThreads, kThreads, 0,
                         stream>>>(list, count, scalars);
    if (const char* error = error_text(cudaGetLastError())) return error;
  }
  return nullptr;
}

const char* adam(const UpdateArrays* arrays, int64_t num_arrays,
                 const AdamOptions& options, const UpdateScalars& scalars,
                 void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (const char* error =
          count_steps(arrays, num_arrays, scalars, cuda_stream)) {
    return error;
  }
  return for_each_update_list(
      arrays, num_arrays,
      [&](auto* c, auto* g, const UpdateList& list, int num_blocks) {
        using C = std::remove_pointer_t<decltype(c)>;
        using G = std::remove_pointer_t<decltype(g)>;
        adam_kernel<C, G><<<num_blocks, kNumThreads, 0, cuda_stream>>>(
            list, options, scalars);
      });
}

}  // namespace smp::kernels::cuda
