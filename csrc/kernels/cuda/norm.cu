#include "csrc/kernels/norm.h"

#include <algorithm>

#include "csrc/kernels/cuda/fused.cuh"

namespace smp::kernels::cuda {

namespace {

template <typename T, int kThreads, int kNum>
__global__ void norm_forward_kernel(Norm norm) {
  using C = Compute<T>;
  const int64_t row = own_row<kThreads>();
  if (row >= norm.num_rows) return;
  const int64_t n = norm.num_columns;
  const T* x = static_cast<const T*>(norm.x) + row * n;
  T* y = static_cast<T*>(norm.y) + row * n;
  const C* weight = static_cast<const C*>(norm.weight);
  const C* bias = static_cast<const C*>(norm.bias);
  C mean = 0;
  if (!norm.is_rms) {
    C sum = 0;
    for_columns<kThreads, kNum>(0, n, [&](int64_t j) {
      const auto values = load_values<kNum>(x + j);
      for (int i = 0; i < kNum; ++i) sum += values.v[i];
    });
    mean = over_row<kThreads>(sum, Add()) / static_cast<C>(n);
  }
  C squares = 0;
  for_columns<kThreads, kNum>(0, n, [&](int64_t j) {
    const auto values = load_values<kNum>(x + j);
    for (int i = 0; i < kNum; ++i) {
      const C d = values.v[i] - mean;
      squares += d * d;
    }
  });
  squares = over_row<kThreads>(squares, Add());
  const C rstd =
      rsqrt_of(squares / static_cast<C>(n) + static_cast<C>(norm.eps));
  for_columns<kThreads, kNum>(0, n, [&](int64_t j) {
    auto values = load_values<kNum>(x + j);
    for (int i = 0; i < kNum; ++i) {
      values.v[i] = (values.v[i] - mean) * rstd;
    }
    if (weight != nullptr) {
      const auto w = load_shared<kNum>(weight + j);
      for (int i = 0; i < kNum; ++i) values.v[i] *= w.v[i];
    }
    if (bias != nullptr) {
      const auto b = load_shared<kNum>(bias + j);
      for (int i = 0; i < kNum; ++i) values.v[i] += b.v[i];
    }
    store_values<kNum>(y + j, values);
  });
  if (threadIdx.x == 0) {
    if (!norm.is_rms) static_cast<C*>(norm.mean)[row] = mean;
    static_cast<C*>(norm.rstd)[row] = rstd;
  }
}

// ---- Backward: dx = rstd (g - b (x - mean) - a) with g = dy * weight, and
// means over the row a = mean(g) and b = mean(g (x - mean)) rstd^2.

// dy * weight
template <int kNum, typename T, typename C>
__device__ inline Values<C, kNum> load_weighted(const T* dy, const C* weight) {
  auto g = load_values<kNum>(dy);
  if (weight != nullptr) {
    const auto w = load_shared<kNum>(weight);
    for (int i = 0; i < kNum; ++i) g.v[i] *= w.v[i];
  }
  return g;
}

template <typename T, int kThreads, int kNum>
__global__ void norm_backward_kernel(NormBackward norm) {
  using C = Compute<T>;
  const int64_t row = own_row<kThreads>();
  if (row >= norm.num_rows) return;
  const int64_t n = norm.num_columns;
  const T* dy = static_cast<const T*>(norm.dy) + row * n;
  const T* x = static_cast<const T*>(norm.x) + row * n;
  T* dx = static_cast<T*>(norm.dx) + row * n;
  const C* weight = static_cast<const C*>(norm.weight);
  const C rstd = static_cast<const C*>(norm.rstd)[row];
  const C mean = norm.is_rms ? C(0) : static_cast<const C*>(norm.mean)[row];
  C sum = 0, product_sum = 0;
  for_columns<kThreads, kNum>(0, n, [&](int64_t j) {
    const auto g =
        load_weighted<kNum>(dy + j, weight == nullptr ? weight : weight + j);
    const auto values = load_values<kNum>(x + j);
    for (int i = 0; i < kNum; ++i) {
      sum += g.v[i];
      product_sum += g.v[i] * (values.v[i] - mean) * rstd;
    }
  });
  const C a =
      norm.is_rms ? C(0) : over_row<kThreads>(sum, Add()) / static_cast<C>(n);
  const C b = over_row<kThreads>(product_sum, Add()) / static_cast<C>(n) * rstd;
  for_columns<kThreads, kNum>(0, n, [&](int64_t j) {
    auto g =
        load_weighted<kNum>(dy + j, weight == nullptr ? weight : weight + j);
    const auto values = load_values<kNum>(x + j);
    for (int i = 0; i < kNum; ++i) {
      g.v[i] = (g.v[i] - (values.v[i] - mean) * b - a) * rstd;
    }
    store_values<kNum>(dx + j, g);
  });
}

template <typename T, int kNum>
__global__ void norm_columns_kernel(NormBackward norm,
                                    Compute<T>* partial_sums) {
  using C = Compute<T>;
  const int64_t n = norm.num_columns;
  const int64_t column =
      (static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x) * kNum;
  C dweight[kNum] = {};
  C dbias[kNum] = {};
  if (column < n) {
    for (int64_t row = blockIdx.y * kColumnRows + threadIdx.y;
         row < norm.num_rows; row += gridDim.y * kColumnRows) {
      const auto d =
          load_values<kNum>(static_cast<const T*>(norm.dy) + row * n + column);
      const auto x =
          load_values<kNum>(static_cast<const T*>(norm.x) + row * n + column);
      const C rstd = static_cast<const C*>(norm.rstd)[row];
      const C mean = norm.is_rms ? C(0) : static_cast<const C*>(norm.mean)[row];
      for (int i = 0; i < kNum; ++i) {
        dweight[i] += d.v[i] * (x.v[i] - mean) * rstd;
        dbias[i] += d.v[i];
      }
    }
  }
  write_partial_sums<kNum>(dweight, column, n, partial_sums);
  write_partial_sums<kNum>(dbias, column, n, partial_sums + gridDim.y * n);
}

// ---- Backward of rows that have a pack for each thread of a block: x and dy
// are read once for all results. A block goes down some rows, and its threads
// keep the sums of their columns.

constexpr int kMaxThreads = 1024;
// Threads that a large GPU runs at a time when each has 64 registers.
constexpr int64_t kRunningThreads = 132 * 1024;

// Returns the sums over a block, for all threads. `shared` must not be that of
// the call before, which may still be read.
template <typename C>
__device__ inline void sum_over_block(C& a, C& b, C (&shared)[2][kWarp]) {
  const auto sum_over_warp = [](C value) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
  };
  const unsigned lane = threadIdx.x % kWarp;
  a = sum_over_warp(a);
  b = sum_over_warp(b);
  if (lane == 0) {
    shared[0][threadIdx.x / kWarp] = a;
    shared[1][threadIdx.x / kWarp] = b;
  }
  __syncthreads();
  const bool has_warp = lane < blockDim.x / kWarp;
  a = sum_over_warp(has_warp ? shared[0][lane] : C(0));
  b = sum_over_warp(has_warp ? shared[1][lane] : C(0));
}

template <typename T, int kNum>
__global__ void __launch_bounds__(kMaxThreads)
    norm_backward_once_kernel(NormBackward norm, Compute<T>* partial_sums) {
  using C = Compute<T>;
  __shared__ C shared[2][2][kWarp];
  const int64_t n = norm.num_columns;
  const int64_t column = static_cast<int64_t>(threadIdx.x) * kNum;
  const bool has_columns = column < n;
  Values<C, kNum> weight, dweight = {}, dbias = {};
  for (int i = 0; i < kNum; ++i) weight.v[i] = C(1);
  if (norm.weight != nullptr && has_columns) {
    weight = load_shared<kNum>(static_cast<const C*>(norm.weight) + column);
  }
  int which = 0;
  for (int64_t row = blockIdx.x; row < norm.num_rows; row += gridDim.x) {
    const int64_t place = row * n + column;
    const C rstd = static_cast<const C*>(norm.rstd)[row];
    const C mean = norm.is_rms ? C(0) : static_cast<const C*>(norm.mean)[row];
    Values<C, kNum> g = {}, x = {};
    C sum = 0, product_sum = 0;
    if (has_columns) {
      g = load_values<kNum>(static_cast<const T*>(norm.dy) + place);
      x = load_values<kNum>(static_cast<const T*>(norm.x) + place);
      for (int i = 0; i < kNum; ++i) {
        x.v[i] -= mean;
        dweight.v[i] += g.v[i] * x.v[i] * rstd;
        dbias.v[i] += g.v[i];
        g.v[i] *= weight.v[i];
        sum += g.v[i];
        product_sum += g.v[i] * x.v[i] * rstd;
      }
    }
    sum_over_block(sum, product_sum, shared[which]);
    which = 1 - which;
    const C a = norm.is_rms ? C(0) : sum / static_cast<C>(n);
    const C b = product_sum / static_cast<C>(n) * rstd;
    if (has_columns) {
      for (int i = 0; i < kNum; ++i) {
        g.v[i] = (g.v[i] - x.v[i] * b - a) * rstd;
      }
      store_values<kNum>(static_cast<T*>(norm.dx) + place, g);
    }
  }
  if (partial_sums == nullptr || !has_columns) return;
  C* sums = partial_sums + blockIdx.x * n + column;
  store_shared<kNum>(sums, dweight);
  store_shared<kNum>(sums + gridDim.x * n, dbias);
}

// Returns the threads per block of the kernel that reads once; 0 where it does
// not fit.
template <typename T>
int64_t once_threads(const NormBackward& norm) {
  const int64_t packs = norm.num_columns / kPack<T>;
  const bool fits = norm.dx != nullptr && packs <= kMaxThreads &&
                    are_packs<T>(norm.num_columns, norm.x, norm.dy, norm.dx);
  return fits ? (packs + kWarp - 1) / kWarp * kWarp : 0;
}

inline int64_t once_blocks(int64_t rows, int64_t threads) {
  return std::min(rows, kRunningThreads / threads);
}

template <typename T>
const char* backward_once(const NormBackward& norm, int64_t threads,
                          void* partial_sums, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>(once_blocks(norm.num_rows, threads));
  norm_backward_once_kernel<T, kPack<T>>
      <<<blocks, static_cast<unsigned>(threads), 0, stream>>>(
          norm, static_cast<Compute<T>*>(partial_sums));
  return launch_error();
}

}  // namespace

const char* norm_forward(const Norm& norm, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return with_type(norm.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool packs = are_packs<T>(norm.num_columns, norm.x, norm.y);
    return with_packs<T>(packs, [&](auto num) {
      return with_threads(norm.num_columns, [&](auto threads) {
        const RowLaunch launch = row_launch<threads>(norm.num_rows);
        norm_forward_kernel<T, threads, num>
            <<<launch.blocks, launch.threads, 0, cuda_stream>>>(norm);
        return launch_error();
      });
    });
  });
}

int64_t norm_partial_rows(const NormBackward& norm) {
  int64_t threads = 0;
  with_type(norm.dtype, [&](auto* type) -> const char* {
    threads = once_threads<std::remove_pointer_t<decltype(type)>>(norm);
    return nullptr;
  });
  return threads > 0 ? once_blocks(norm.num_rows, threads)
                     : partial_rows(norm.num_rows, norm.num_columns);
}

const char* norm_backward(const NormBackward& norm, void* partial_sums,
                          void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return with_type(norm.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (const int64_t threads = once_threads<T>(norm)) {
      return backward_once<T>(norm, threads, partial_sums, cuda_stream);
    }
    const bool packs = are_packs<T>(norm.num_columns, norm.x, norm.dy, norm.dx);
    return with_packs<T>(packs, [&](auto num) -> const char* {
      if (norm.dx != nullptr) {
        const char* error = with_threads(norm.num_columns, [&](auto threads) {
          const RowLaunch launch = row_launch<threads>(norm.num_rows);
          norm_backward_kernel<T, threads, num>
              <<<launch.blocks, launch.threads, 0, cuda_stream>>>(norm);
          return launch_error();
        });
        if (error != nullptr) return error;
      }
      if (partial_sums == nullptr) return nullptr;
      const dim3 blocks(
          static_cast<unsigned>(column_blocks(norm.num_columns, num)),
          static_cast<unsigned>(norm_partial_rows(norm)));
      norm_columns_kernel<T, num>
          <<<blocks, dim3(kWarp, kColumnRows), 0, cuda_stream>>>(
              norm, static_cast<Compute<T>*>(partial_sums));
      return launch_error();
    });
  });
}

}  // namespace smp::kernels::cuda
