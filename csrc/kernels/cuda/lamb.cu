#include "csrc/kernels/cuda/adam.cuh"
#include "csrc/kernels/cuda/slots.cuh"

namespace smp::kernels::cuda {

namespace {

// `slots`: sums of squares of the parameter per chunk; `num_slots` later those
// of its update.
template <typename C, typename G>
__global__ void lamb_moments_kernel(SMP_LIST(UpdateList) list,
                                    AdamOptions options, UpdateScalars scalars,
                                    double* slots, int64_t num_slots) {
  const UpdateItem& item = list.items[list.array_idxs[blockIdx.x]];
  double param_squares = 0;
  double update_squares = 0;
  if (!is_skipped(scalars)) {
    const Factors<C> f(block_factors(options, item, scalars), 1);
    const C* param = static_cast<const C*>(item.param);
    const G* grad = static_cast<const G*>(item.grad);
    C* exp_avg = static_cast<C*>(item.exp_avg);
    C* exp_avg_sq = static_cast<C*>(item.exp_avg_sq);
    for_updates<C>(item, block_range(list), [&](auto num, int64_t i) {
      constexpr int kNum = decltype(num)::value;
      const auto p = load_values<kNum>(param + i);
      auto m = load_values<kNum>(exp_avg + i);
      auto v = load_values<kNum>(exp_avg_sq + i);
      const auto g = load_values<kNum>(grad + i);
      C p_sum = 0;
      C u_sum = 0;
#pragma unroll
      for (int k = 0; k < kNum; ++k) {
        f.move(g.v[k], p.v[k], &m.v[k], &v.v[k]);
        const C u = f.update(p.v[k], m.v[k], v.v[k]);
        p_sum += p.v[k] * p.v[k];
        u_sum += u * u;
      }
      store_values<kNum>(exp_avg + i, m);
      store_values<kNum>(exp_avg_sq + i, v);
      param_squares += p_sum;
      update_squares += u_sum;
    });
  }
  const double param_total = block_sum(param_squares);
  const int64_t slot = item.first_slot + list.chunk_idxs[blockIdx.x];
  if (threadIdx.x == 0) slots[slot] = param_total;
  const double update_total = block_sum(update_squares);
  if (threadIdx.x == 0) slots[slot + num_slots] = update_total;
}

template <typename C, typename G>
__global__ void lamb_apply_kernel(SMP_LIST(UpdateList) list,
                                  LambOptions options, UpdateScalars scalars,
                                  const double* sums, int64_t num_arrays) {
  if (is_skipped(scalars)) return;
  const UpdateItem& item = list.items[list.array_idxs[blockIdx.x]];
  const double ratio =
      trust_ratio(options, sums[item.idx], sums[num_arrays + item.idx]);
  const Factors<C> f(block_factors(options.adam, item, scalars),
                     *scalars.lr * ratio);
  const C* param = static_cast<const C*>(item.param);
  const C* exp_avg = static_cast<const C*>(item.exp_avg);
  const C* exp_avg_sq = static_cast<const C*>(item.exp_avg_sq);
  for_updates<C>(item, block_range(list), [&](auto num, int64_t i) {
    constexpr int kNum = decltype(num)::value;
    auto p = load_values<kNum>(param + i);
    const auto m = load_values<kNum>(exp_avg + i);
    const auto v = load_values<kNum>(exp_avg_sq + i);
#pragma unroll
    for (int k = 0; k < kNum; ++k) {
      p.v[k] -= f.update(p.v[k], m.v[k], v.v[k]);
    }
    store_param<kNum>(item, i, p);
  });
}

int64_t num_slots(const UpdateArrays* arrays, int64_t num_arrays) {
  int64_t count = 0;
  for (int64_t i = 0; i < num_arrays; ++i) {
    count += num_chunks(arrays[i].num_elements);
  }
  return count;
}

}  // namespace

int64_t num_lamb_partial_sums(const UpdateArrays* arrays, int64_t num_arrays) {
  return 2 * num_slots(arrays, num_arrays);
}

const char* lamb_moments(const UpdateArrays* arrays, int64_t num_arrays,
                         const AdamOptions& options,
                         const UpdateScalars& scalars, double* partial_sums,
                         double* sums, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int64_t slots = num_slots(arrays, num_arrays);
  if (const char* error =
          count_steps(arrays, num_arrays, scalars, cuda_stream)) {
    return error;
  }
  if (const char *error = for_each_update_list(
          arrays, num_arrays,
          [&](auto* c, auto* g, const UpdateList& list, int num_blocks) {
            using C = std::remove_pointer_t<decltype(c)>;
            using G = std::remove_pointer_t<decltype(g)>;
            lamb_moments_kernel<C, G>
                <<<num_blocks, kNumThreads, 0, cuda_stream>>>(
                    list, options, scalars, partial_sums, slots);
          })) {
    return error;
  }
  for (int which = 0; which < 2; ++which) {
    if (const char* error = combine_slots<TakeSum>(
            num_arrays,
            [&](int64_t i) { return num_chunks(arrays[i].num_elements); },
            partial_sums + which * slots, sums + which * num_arrays,
            cuda_stream)) {
      return error;
    }
  }
  return nullptr;
}

const char* lamb_apply(const UpdateArrays* arrays, int64_t num_arrays,
                       const LambOptions& options, const UpdateScalars& scalars,
                       const double* sums, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return for_each_update_list(
      arrays, num_arrays,
      [&](auto* c, auto* g, const UpdateList& list, int num_blocks) {
        using C = std::remove_pointer_t<decltype(c)>;
        using G = std::remove_pointer_t<decltype(g)>;
        lamb_apply_kernel<C, G><<<num_blocks, kNumThreads, 0, cuda_stream>>>(
            list, options, scalars, sums, num_arrays);
      });
}

}  // namespace smp::kernels::cuda
