#include "csrc/kernels/norm.h"

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
      C v = (values.v[i] - mean) * rstd;
      if (weight != nullptr) v *= weight[j + i];
      if (bias != nullptr) v += bias[j + i];
      values.v[i] = v;
    }
    store_values<kNum>(y + j, values);
  });
  if (threadIdx.x == 0) {
    if (!norm.is_rms) static_cast<C*>(norm.mean)[row] = mean;
    static_cast<C*>(norm.rstd)[row] = rstd;
  }
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
    const auto d = load_values<kNum>(dy + j);
    const auto values = load_values<kNum>(x + j);
    for (int i = 0; i < kNum; ++i) {
      const C g = weight != nullptr ? d.v[i] * weight[j + i] : d.v[i];
      sum += g;
      product_sum += g * (values.v[i] - mean) * rstd;
    }
  });
  const C a =
      norm.is_rms ? C(0) : over_row<kThreads>(sum, Add()) / static_cast<C>(n);
  const C b = over_row<kThreads>(product_sum, Add()) / static_cast<C>(n) * rstd;
  for_columns<kThreads, kNum>(0, n, [&](int64_t j) {
    auto d = load_values<kNum>(dy + j);
    const auto values = load_values<kNum>(x + j);
    for (int i = 0; i < kNum; ++i) {
      const C g = weight != nullptr ? d.v[i] * weight[j + i] : d.v[i];
      d.v[i] = (g - (values.v[i] - mean) * b - a) * rstd;
    }
    store_values<kNum>(dx + j, d);
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
  return partial_rows(norm.num_rows, norm.num_columns);
}

const char* norm_backward(const NormBackward& norm, void* partial_sums,
                          void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return with_type(norm.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
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
