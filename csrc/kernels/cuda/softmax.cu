#include "csrc/kernels/softmax.h"

#include <cmath>

#include "csrc/kernels/cuda/fused.cuh"

namespace smp::kernels::cuda {

namespace {

// Returns a NaN only if both numbers are.
__device__ inline float larger_of(float a, float b) { return fmaxf(a, b); }

// Returns e^x, x <= 0, for a sum of n terms of which the largest is 1. The
// product rounds x, so a term is off by |x| roundings. The mean of |x| over the
// sum is its entropy less its logarithm, so the sum is off by ln n at most.
__device__ inline float exp_in_sum(float x) {
  return exp2f(x * 1.44269504088896340736f);
}
__device__ inline double exp_in_sum(double x) { return exp(x); }

// Maximum and sum of exponentials of the elements seen so far.
template <typename C>
struct Online {
  C max = -INFINITY;
  C sum = 0;

  // Computes one exponential per element, and one per pack for the change of
  // the maximum, without a branch. Two doubles take one each.
  template <int kNum>
  __device__ void add(const Values<C, kNum>& values) {
    if constexpr (kNum <= 2) {
#pragma unroll
      for (int i = 0; i < kNum; ++i) add(values.v[i]);
    } else {
      C now = max;
#pragma unroll
      for (int i = 0; i < kNum; ++i) now = larger_of(now, values.v[i]);
      const C shift = finite(now);
      sum *= exp_in_sum(max - shift);
#pragma unroll
      for (int i = 0; i < kNum; ++i) sum += exp_in_sum(values.v[i] - shift);
      max = now;
    }
  }

  // Computes the exponential of the smaller one of maximum and value: that of
  // the other one is 1. A NaN is the smaller one.
  __device__ void add(C value) {
    if constexpr (sizeof(C) == 8) {
      // Keeps the code of two exponentials apart, within 64 registers.
      if (value == -INFINITY) return;
    }
    const bool is_larger = value > max;
    const C now = is_larger ? value : max;
    const C power = exp_in_sum((is_larger ? max : value) - finite(now));
    sum = is_larger ? sum * power + C(1) : sum + power;
    max = now;
  }

  // Returns what to subtract: elements that are all -inf stay so.
  __device__ static C finite(C max) { return max == -INFINITY ? C(0) : max; }
};

// Returns the row's maximum, and its sum relative to that.
template <int kThreads, typename C>
__device__ Online<C> over_row(Online<C> own) {
  Online<C> row;
  row.max = over_row<kThreads>(own.max, Larger());
  own.sum *= exp_in_sum(own.max - Online<C>::finite(row.max));
  row.sum = over_row<kThreads>(own.sum, Add());
  return row;
}

template <typename C>
__device__ C drop(C v, const Dropout& dropout, RowKey key, int64_t column) {
  const uint32_t hash =
      column_hash<uint32_t>(static_cast<uint32_t>(column), dropout.column_key);
  return stays(dropout, key, hash) ? v * static_cast<C>(dropout.scale) : C(0);
}

// Computes attention probabilities. Elements out of sight are skipped kNum at a
// time, so a group of them may hold both kinds.
template <typename T>
struct ScoreReader {
  using C = Compute<T>;

  const C* mask;
  C scale;
  C slope;
  C position;  // of the query among the keys
  KeyRange range;
  bool has_slope;

  __device__ ScoreReader(const ScaledMaskedSoftmax& op, int64_t row) {
    const int64_t query = row % op.num_queries;
    const int64_t head = row / op.num_queries % op.num_heads;
    const int64_t sample = row / op.num_queries / op.num_heads;
    mask = op.mask == nullptr
               ? nullptr
               : static_cast<const C*>(op.mask) +
                     sample * op.mask_batch_stride +
                     head * op.mask_head_stride + query * op.mask_query_stride;
    scale = static_cast<C>(op.scale);
    has_slope = op.slopes != nullptr;
    slope = has_slope ? static_cast<const C*>(op.slopes)[head] : C(0);
    position = static_cast<C>(query + op.num_keys - op.num_queries);
    range = visible_keys(query, op.num_queries, op.num_keys, op.is_causal,
                         op.window);
  }

  __device__ C operator()(C score, int64_t key) const {
    if (key < range.begin || key >= range.end) return -INFINITY;
    C v = score * scale;
    if (mask != nullptr) v += mask[key];
    if (has_slope) {
      const C d = position - static_cast<C>(key);
      v -= slope * (d < C(0) ? -d : d);
    }
    return v;
  }
};

template <typename T, int kThreads, int kNum>
__global__ void softmax_forward_kernel(ScaledMaskedSoftmax op,
                                       int64_t num_rows) {
  using C = Compute<T>;
  const int64_t row = own_row<kThreads>();
  if (row >= num_rows) return;
  const int64_t n = op.num_keys;
  const T* scores = static_cast<const T*>(op.scores) + row * n;
  T* probs = static_cast<T*>(op.probs) + row * n;
  T* y = op.y == nullptr ? nullptr : static_cast<T*>(op.y) + row * n;
  const ScoreReader<T> read(op, row);
  const int64_t first = read.range.begin / kNum * kNum;
  Online<C> own;
  for_columns<kThreads, kNum>(first, read.range.end, [&](int64_t j) {
    auto values = load_values<kNum>(scores + j);
#pragma unroll
    for (int i = 0; i < kNum; ++i) values.v[i] = read(values.v[i], j + i);
    own.add(values);
  });
  const Online<C> total = over_row<kThreads>(own);
  const C factor = total.sum == C(0) ? C(0) : C(1) / total.sum;
  const RowKey key = row_key(op.dropout.seed, static_cast<uint64_t>(row));
  for_columns<kThreads, kNum>(0, n, [&](int64_t j) {
    Values<C, kNum> values = {};
    if (j + kNum > read.range.begin && j < read.range.end && factor != C(0)) {
      values = load_values<kNum>(scores + j);
#pragma unroll
      for (int i = 0; i < kNum; ++i) {
        values.v[i] = exp_of(read(values.v[i], j + i) - total.max) * factor;
      }
    }
    store_values<kNum>(probs + j, values);
    if (y == nullptr) return;
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      values.v[i] = drop(values.v[i], op.dropout, key, j + i);
    }
    store_values<kNum>(y + j, values);
  });
}

template <typename T, int kThreads, int kNum>
__global__ void softmax_backward_kernel(ScaledMaskedSoftmaxBackward op) {
  using C = Compute<T>;
  const int64_t row = own_row<kThreads>();
  if (row >= op.num_rows) return;
  const int64_t n = op.num_keys;
  const T* dy = static_cast<const T*>(op.dy) + row * n;
  const T* probs = static_cast<const T*>(op.probs) + row * n;
  T* dscores = static_cast<T*>(op.dscores) + row * n;
  const KeyRange range = visible_keys(row % op.num_queries, op.num_queries, n,
                                      op.is_causal, op.window);
  const int64_t first = range.begin / kNum * kNum;
  const RowKey key = row_key(op.dropout.seed, static_cast<uint64_t>(row));
  const auto load_dprobs = [&](int64_t j) {
    auto d = load_values<kNum>(dy + j);
    if (op.dropout.threshold != 0) {
#pragma unroll
      for (int i = 0; i < kNum; ++i) {
        d.v[i] = drop(d.v[i], op.dropout, key, j + i);
      }
    }
    return d;
  };
  C sum = 0;
  // Out of sight probabilities are 0.
  for_columns<kThreads, kNum>(first, range.end, [&](int64_t j) {
    const auto d = load_dprobs(j);
    const auto p = load_values<kNum>(probs + j);
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      sum += d.v[i] * p.v[i];
    }
  });
  sum = over_row<kThreads>(sum, Add());
  const C scale = static_cast<C>(op.scale);
  for_columns<kThreads, kNum>(0, n, [&](int64_t j) {
    Values<C, kNum> result = {};
    if (j + kNum > range.begin && j < range.end) {
      const auto d = load_dprobs(j);
      const auto p = load_values<kNum>(probs + j);
#pragma unroll
      for (int i = 0; i < kNum; ++i) {
        result.v[i] = (d.v[i] - sum) * p.v[i] * scale;
      }
    }
    store_values<kNum>(dscores + j, result);
  });
}

// ---- Cross entropy

template <typename T, int kThreads, int kNum>
__global__ void cross_entropy_forward_kernel(CrossEntropy op) {
  using C = Compute<T>;
  const int64_t row = own_row<kThreads>();
  if (row >= op.num_rows) return;
  const int64_t n = op.num_columns;
  const T* logits = static_cast<const T*>(op.logits) + row * op.row_stride;
  Online<C> own;
  C sum = 0;
  for_columns<kThreads, kNum>(0, n, [&](int64_t j) {
    const auto values = load_values<kNum>(logits + j);
    own.add(values);
#pragma unroll
    for (int i = 0; i < kNum; ++i) sum += values.v[i];
  });
  const Online<C> total = over_row<kThreads>(own);
  if (op.sum != nullptr) sum = over_row<kThreads>(sum, Add());
  if (threadIdx.x != 0) return;
  const int64_t number = op.targets[row];
  const int64_t target = number - op.first_column;
  C target_logit = 0;
  if (number != op.ignore_index) {
    if (number < 0 || number >= op.vocab_size) {
      target_logit = NAN;
    } else if (target >= 0 && target < n) {
      target_logit = Element<T>::load(logits[target]) - total.max;
    }
  }
  static_cast<C*>(op.max)[row] = total.max;
  static_cast<C*>(op.exp_sum)[row] = total.sum;
  static_cast<C*>(op.target_logit)[row] = target_logit;
  if (op.sum != nullptr) {
    static_cast<C*>(op.sum)[row] = sum - static_cast<C>(n) * total.max;
  }
}

template <typename T, int kThreads, int kNum>
__global__ void cross_entropy_backward_kernel(CrossEntropyBackward op) {
  using C = Compute<T>;
  const int64_t row = own_row<kThreads>();
  if (row >= op.num_rows) return;
  const int64_t n = op.num_columns;
  const T* logits = static_cast<const T*>(op.logits) + row * op.row_stride;
  T* dlogits = static_cast<T*>(op.dlogits) + row * n;
  const bool is_ignored = op.targets[row] == op.ignore_index;
  const C max = static_cast<const C*>(op.max)[row];
  const C dloss = static_cast<const C*>(op.dloss)[row];
  const C factor = dloss / static_cast<const C*>(op.exp_sum)[row];
  const C smoothing = static_cast<C>(op.label_smoothing);
  const C spread = dloss * smoothing / static_cast<C>(op.vocab_size);
  const int64_t target = op.targets[row] - op.first_column;
  for_columns<kThreads, kNum>(0, n, [&](int64_t j) {
    Values<C, kNum> values = {};
    if (!is_ignored) {
      values = load_values<kNum>(logits + j);
#pragma unroll
      for (int i = 0; i < kNum; ++i) {
        C v = exp_of(values.v[i] - max) * factor - spread;
        if (j + i == target) v -= dloss * (C(1) - smoothing);
        values.v[i] = v;
      }
    }
    store_values<kNum>(dlogits + j, values);
  });
}

}  // namespace

const char* softmax_forward(const ScaledMaskedSoftmax& op, void* stream) {
  const int64_t num_rows = op.batch_size * op.num_heads * op.num_queries;
  return with_type(op.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool packs = are_packs<T>(op.num_keys, op.scores, op.probs, op.y);
    return with_packs<T>(packs, [&](auto num) {
      return with_threads(op.num_keys, [&](auto threads) {
        const RowLaunch launch = row_launch<threads>(num_rows);
        softmax_forward_kernel<T, threads, num>
            <<<launch.blocks, launch.threads, 0,
               static_cast<cudaStream_t>(stream)>>>(op, num_rows);
        return launch_error();
      });
    });
  });
}

const char* softmax_backward(const ScaledMaskedSoftmaxBackward& op,
                             void* stream) {
  return with_type(op.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool packs = are_packs<T>(op.num_keys, op.dy, op.probs, op.dscores);
    return with_packs<T>(packs, [&](auto num) {
      return with_threads(op.num_keys, [&](auto threads) {
        const RowLaunch launch = row_launch<threads>(op.num_rows);
        softmax_backward_kernel<T, threads, num>
            <<<launch.blocks, launch.threads, 0,
               static_cast<cudaStream_t>(stream)>>>(op);
        return launch_error();
      });
    });
  });
}

const char* cross_entropy_forward(const CrossEntropy& op, void* stream) {
  return with_type(op.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool packs = are_packs<T>(op.num_columns, op.logits) &&
                       op.row_stride % kPack<T> == 0;
    return with_packs<T>(packs, [&](auto num) {
      return with_threads(op.num_columns, [&](auto threads) {
        const RowLaunch launch = row_launch<threads>(op.num_rows);
        cross_entropy_forward_kernel<T, threads, num>
            <<<launch.blocks, launch.threads, 0,
               static_cast<cudaStream_t>(stream)>>>(op);
        return launch_error();
      });
    });
  });
}

const char* cross_entropy_backward(const CrossEntropyBackward& op,
                                   void* stream) {
  return with_type(op.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool packs = are_packs<T>(op.num_columns, op.logits, op.dlogits) &&
                       op.row_stride % kPack<T> == 0;
    return with_packs<T>(packs, [&](auto num) {
      return with_threads(op.num_columns, [&](auto threads) {
        const RowLaunch launch = row_launch<threads>(op.num_rows);
        cross_entropy_backward_kernel<T, threads, num>
            <<<launch.blocks, launch.threads, 0,
               static_cast<cudaStream_t>(stream)>>>(op);
        return launch_error();
      });
    });
  });
}

}  // namespace smp::kernels::cuda
