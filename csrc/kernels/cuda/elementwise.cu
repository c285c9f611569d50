#include "csrc/kernels/elementwise.h"

#include <algorithm>

#include "csrc/kernels/cuda/fused.cuh"

namespace smp::kernels::cuda {

namespace {

// ---- GELU

template <typename C>
constexpr C kTanhScale = C(1.59576912160573071176);  // 2 sqrt(2 / pi)
template <typename C>
constexpr C kTanhCubic = C(0.044715);

template <typename C>
__device__ C gelu_of(C x, bool is_tanh) {
  if (!is_tanh) return x * cdf_of(x);
  const C u = x * kTanhScale<C> * (C(1) + kTanhCubic<C> * (x * x));
  return x / (C(1) + exp_of(-u));
}

template <typename C>
__device__ C gelu_slope(C x, bool is_tanh) {
  if (!is_tanh) {
    return cdf_of(x) + x * exp_of(x * x * C(-0.5)) * C(0.39894228040143267794);
  }
  const C square = x * x;
  C u = x * kTanhScale<C> * (C(1) + kTanhCubic<C> * square);
  u = u < C(-80) ? C(-80) : u;  // keeps e finite
  const C e = exp_of(-u);
  const C s = C(1) / (C(1) + e);
  const C du = kTanhScale<C> * (C(1) + 3 * kTanhCubic<C> * square);
  return s + x * s * (e * s) * du;
}

// Computes forward and backward: result = gelu(x + bias), or dy * its slope.
template <typename T, int kNum, bool kIsBackward>
struct GeluBody {
  using C = Compute<T>;
  BiasGelu op;

  __device__ const void* bias() const { return op.bias; }

  __device__ void operator()(int64_t row, int64_t column,
                             const Values<C, kNum>& bias, C (&sums)[kNum]) {
    const int64_t place = row * op.num_columns + column;
    auto values = load_values<kNum>(static_cast<const T*>(op.x) + place);
    Values<C, kNum> dy;
    if constexpr (kIsBackward) {
      dy = load_values<kNum>(static_cast<const T*>(op.dy) + place);
    }
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      C v = values.v[i];
      if (op.bias != nullptr) v += bias.v[i];
      if constexpr (kIsBackward) {
        v = dy.v[i] * gelu_slope(v, op.is_tanh);
        sums[i] += v;
      } else {
        v = gelu_of(v, op.is_tanh);
      }
      values.v[i] = v;
    }
    store_values<kNum>(static_cast<T*>(op.result) + place, values);
  }
};

// ---- Dropout

template <typename C>
__device__ C drop(C v, const Dropout& dropout, RowKey key, int64_t column) {
  if (dropout.threshold == 0) return v;
  const uint32_t hash =
      column_hash<uint32_t>(static_cast<uint32_t>(column), dropout.column_key);
  return stays(dropout, key, hash) ? v * static_cast<C>(dropout.scale) : C(0);
}

template <typename T, typename Y, int kNum>
struct DropoutBody {
  using C = Compute<T>;
  BiasDropoutResidual op;

  __device__ const void* bias() const { return op.bias; }

  __device__ void operator()(int64_t row, int64_t column,
                             const Values<C, kNum>& bias, C (&)[kNum]) {
    const int64_t place = row * op.num_columns + column;
    auto values = load_values<kNum>(static_cast<const T*>(op.x) + place);
    const RowKey key = row_key(op.dropout.seed, static_cast<uint64_t>(row));
    Values<C, kNum> residual = {};
    if (op.residual != nullptr) {
      residual = load_values<kNum>(static_cast<const Y*>(op.residual) + place);
    }
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      C v = values.v[i];
      if (op.bias != nullptr) v += bias.v[i];
      values.v[i] = drop(v, op.dropout, key, column + i) + residual.v[i];
    }
    store_values<kNum>(static_cast<Y*>(op.y) + place, values);
  }
};

template <typename T, typename Y, int kNum>
struct DropoutBackwardBody {
  using C = Compute<T>;
  BiasDropoutResidualBackward op;

  __device__ const void* bias() const { return nullptr; }

  __device__ void operator()(int64_t row, int64_t column,
                             const Values<C, kNum>&, C (&sums)[kNum]) {
    const int64_t place = row * op.num_columns + column;
    auto d = load_values<kNum>(static_cast<const Y*>(op.dy) + place);
    const RowKey key = row_key(op.dropout.seed, static_cast<uint64_t>(row));
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      d.v[i] = drop(d.v[i], op.dropout, key, column + i);
      sums[i] += d.v[i];
    }
    store_values<kNum>(static_cast<T*>(op.dx) + place, d);
  }
};

// ---- Walks down the columns

template <typename C, int kNum, typename Body>
__global__ void columns_kernel(int64_t rows, int64_t columns, Body body,
                               C* partial_sums) {
  const int64_t column =
      (static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x) * kNum;
  C sums[kNum] = {};
  if (column < columns) {
    Values<C, kNum> bias = {};
    if (body.bias() != nullptr) {
      bias = load_shared<kNum>(static_cast<const C*>(body.bias()) + column);
    }
    for (int64_t row = blockIdx.y * kColumnRows + threadIdx.y; row < rows;
         row += gridDim.y * kColumnRows) {
      body(row, column, bias, sums);
    }
  }
  if (partial_sums != nullptr) {
    write_partial_sums<kNum>(sums, column, columns, partial_sums);
  }
}

template <typename C, int kNum, typename Body>
const char* launch_columns(int64_t rows, int64_t columns, Body body,
                           void* partial_sums, void* stream) {
  const dim3 blocks(static_cast<unsigned>(column_blocks(columns, kNum)),
                    static_cast<unsigned>(column_partial_rows(rows, columns)));
  columns_kernel<C, kNum, Body><<<blocks, dim3(kWarp, kColumnRows), 0,
                                  static_cast<cudaStream_t>(stream)>>>(
      rows, columns, body, static_cast<C*>(partial_sums));
  return launch_error();
}

template <bool kIsBackward>
const char* gelu(const BiasGelu& op, void* partial_sums, void* stream) {
  return with_type(op.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool packs = are_packs<T>(op.num_columns, op.x, op.dy, op.result);
    return with_packs<T>(packs, [&](auto num) {
      return launch_columns<Compute<T>, num>(op.num_rows, op.num_columns,
                                             GeluBody<T, num, kIsBackward>{op},
                                             partial_sums, stream);
    });
  });
}

// Calls function(T*, Y*) with the types of x and y: one type, or 16 bits and
// float.
template <typename Function>
const char* with_types(Dtype dtype, Dtype y_dtype, Function&& function) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (sizeof(T) == 2) {
      if (y_dtype == Dtype::kFloat) {
        return function(type, static_cast<float*>(nullptr));
      }
    }
    return function(type, type);
  });
}

// ---- Rotary embedding: one thread per group of pairs of a head, or group of
// features to copy; blocks go on from position to position.

struct RotaryParts {
  uint32_t num_groups;  // of pairs, in a head
  uint32_t per_head;    // these, and what is to copy
};

// Interleaved, kNum features hold kNum / 2 pairs; one pair if kNum is 1.
template <int kNum>
__host__ __device__ int64_t pairs_each(const Rotary& op) {
  return op.is_interleaved && kNum > 1 ? kNum / 2 : kNum;
}

// Pairs (p, p + num_pairs) from `pair` on.
template <typename T, int kNum>
__device__ void rotate_halves(const Rotary& op, int64_t pair, const T* x, T* y,
                              const Compute<T>* cos, const Compute<T>* sin) {
  using C = Compute<T>;
  const C sign = op.is_inverse ? C(-1) : C(1);
  const auto c = load_shared<kNum>(cos);
  const auto s = load_shared<kNum>(sin);
  auto a = load_values<kNum>(x + pair);
  auto b = load_values<kNum>(x + op.num_pairs + pair);
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    const C turned = s.v[i] * sign;
    const C first = a.v[i] * c.v[i] - b.v[i] * turned;
    b.v[i] = b.v[i] * c.v[i] + a.v[i] * turned;
    a.v[i] = first;
  }
  store_values<kNum>(y + pair, a);
  store_values<kNum>(y + op.num_pairs + pair, b);
}

// Pairs (2 p, 2 p + 1) from `pair` on.
template <typename T, int kNum>
__device__ void rotate_neighbours(const Rotary& op, int64_t pair, const T* x,
                                  T* y, const Compute<T>* cos,
                                  const Compute<T>* sin) {
  using C = Compute<T>;
  const C sign = op.is_inverse ? C(-1) : C(1);
  if constexpr (kNum > 1) {
    const auto c = load_shared<kNum / 2>(cos);
    const auto s = load_shared<kNum / 2>(sin);
    auto values = load_values<kNum>(x + 2 * pair);
#pragma unroll
    for (int i = 0; i < kNum / 2; ++i) {
      const C a = values.v[2 * i], b = values.v[2 * i + 1];
      values.v[2 * i] = a * c.v[i] - b * s.v[i] * sign;
      values.v[2 * i + 1] = b * c.v[i] + a * s.v[i] * sign;
    }
    store_values<kNum>(y + 2 * pair, values);
  } else {
    const C a = Element<T>::load(x[2 * pair]);
    const C b = Element<T>::load(x[2 * pair + 1]);
    y[2 * pair] = Element<T>::store(a * cos[0] - b * sin[0] * sign);
    y[2 * pair + 1] = Element<T>::store(b * cos[0] + a * sin[0] * sign);
  }
}

template <typename T, int kNum>
__global__ void rotary_kernel(Rotary op, RotaryParts parts) {
  using C = Compute<T>;
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t head = thread / parts.per_head;
  const uint32_t part = thread % parts.per_head;
  if (head >= op.num_heads) return;
  const int64_t pair = part * pairs_each<kNum>(op);
  const int64_t copied =
      2 * op.num_pairs + (int64_t{part} - parts.num_groups) * kNum;
  for (int64_t sample = blockIdx.z; sample < op.batch_size;
       sample += gridDim.z) {
    for (int64_t position = blockIdx.y; position < op.length;
         position += gridDim.y) {
      const int64_t row = sample * op.length + position;
      const T* x = static_cast<const T*>(op.x) + sample * op.batch_stride +
                   position * op.length_stride + head * op.head_stride;
      T* y = static_cast<T*>(op.y) + (row * op.num_heads + head) * op.head_size;
      if (part >= parts.num_groups) {
        store_pack<kNum>(y + copied, load_pack<kNum>(x + copied));
        continue;
      }
      const int64_t angle =
          (op.is_table_per_sample ? row : position) * op.num_pairs + pair;
      const C* cos = static_cast<const C*>(op.cos) + angle;
      const C* sin = static_cast<const C*>(op.sin) + angle;
      if (op.is_interleaved) {
        rotate_neighbours<T, kNum>(op, pair, x, y, cos, sin);
      } else {
        rotate_halves<T, kNum>(op, pair, x, y, cos, sin);
      }
    }
  }
}

// Returns whether each group of pairs of each head can be read 16 bytes at a
// time.
template <typename T>
bool are_rotary_packs(const Rotary& op) {
  const int64_t rotated_part =
      op.is_interleaved ? 2 * op.num_pairs : op.num_pairs;
  return are_packs<T>(rotated_part, op.x, op.y) &&
         op.head_size % kPack<T> == 0 && op.head_stride % kPack<T> == 0 &&
         op.length_stride % kPack<T> == 0 && op.batch_stride % kPack<T> == 0;
}

}  // namespace

int64_t column_partial_rows(int64_t num_rows, int64_t num_columns) {
  return partial_rows(num_rows, num_columns);
}

const char* bias_gelu_forward(const BiasGelu& op, void* stream) {
  return gelu<false>(op, nullptr, stream);
}

const char* bias_gelu_backward(const BiasGelu& op, void* partial_sums,
                               void* stream) {
  return gelu<true>(op, partial_sums, stream);
}

const char* bias_dropout_residual_forward(const BiasDropoutResidual& op,
                                          void* stream) {
  return with_types(op.dtype, op.y_dtype, [&](auto* type, auto* y_type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using Y = std::remove_pointer_t<decltype(y_type)>;
    const bool packs = are_packs<T>(op.num_columns, op.x, op.residual, op.y);
    return with_packs<T>(packs, [&](auto num) {
      return launch_columns<Compute<T>, num>(op.num_rows, op.num_columns,
                                             DropoutBody<T, Y, num>{op},
                                             nullptr, stream);
    });
  });
}

const char* bias_dropout_residual_backward(
    const BiasDropoutResidualBackward& op, void* partial_sums, void* stream) {
  return with_types(op.dtype, op.y_dtype, [&](auto* type, auto* y_type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using Y = std::remove_pointer_t<decltype(y_type)>;
    const bool packs = are_packs<T>(op.num_columns, op.dy, op.dx);
    return with_packs<T>(packs, [&](auto num) {
      return launch_columns<Compute<T>, num>(op.num_rows, op.num_columns,
                                             DropoutBackwardBody<T, Y, num>{op},
                                             partial_sums, stream);
    });
  });
}

const char* rotary(const Rotary& op, void* stream) {
  constexpr int64_t kThreads = 256, kMaxBlocks = 65535;  // of y and of z
  return with_type(op.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return with_packs<T>(are_rotary_packs<T>(op), [&](auto num) -> const char* {
      const int64_t num_groups = op.num_pairs / pairs_each<num>(op);
      const int64_t per_head =
          num_groups + (op.head_size - 2 * op.num_pairs) / num;
      const int64_t num_threads = op.num_heads * per_head;
      if (num_threads > INT32_MAX) {
        return "rotary: heads of one position have more than 2^31 parts";
      }
      const int64_t threads = num_threads < kThreads
                                  ? (num_threads + kWarp - 1) / kWarp * kWarp
                                  : kThreads;
      const dim3 blocks(
          static_cast<unsigned>((num_threads + threads - 1) / threads),
          static_cast<unsigned>(std::min(op.length, kMaxBlocks)),
          static_cast<unsigned>(std::min(op.batch_size, kMaxBlocks)));
      rotary_kernel<T, num><<<blocks, static_cast<unsigned>(threads), 0,
                              static_cast<cudaStream_t>(stream)>>>(
          op, RotaryParts{static_cast<uint32_t>(num_groups),
                          static_cast<uint32_t>(per_head)});
      return launch_error();
    });
  });
}

}  // namespace smp::kernels::cuda
