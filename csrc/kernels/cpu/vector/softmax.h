#pragma once

#include "csrc/kernels/cpu/vector/dropout.h"
#include "csrc/kernels/cpu/vector/math.h"
#include "csrc/kernels/softmax.h"

namespace smp::kernels::cpu::SMP_ISA {

// ---- Attention probabilities

template <typename C>
constexpr C kMinusInfinity = -C(__builtin_inff());

template <typename T>
SMP_INLINE void fill_zero(T* row, int64_t begin, int64_t end) {
  if (end > begin) __builtin_memset(row + begin, 0, (end - begin) * sizeof(T));
}

// Returns the number of keys to compute: those seen, up to a whole vector if
// the row is long enough. Parts of vectors are slow.
template <typename C>
SMP_INLINE int64_t num_worked_on(KeyRange range, int64_t num_keys) {
  const int64_t num_seen = range.end - range.begin;
  const int64_t whole = (num_seen + kLanes<C> - 1) / kLanes<C> * kLanes<C>;
  const int64_t possible = num_keys - range.begin;
  return whole < possible ? whole : possible;
}

// Writes scaled and masked scores of `num` keys into `values`, -inf for keys
// past the range. Returns their maximum.
template <typename T>
SMP_INLINE Compute<T> masked_scores(const ScaledMaskedSoftmax& op, int64_t row,
                                    int64_t query, KeyRange range, int64_t num,
                                    Compute<T>* values) {
  using C = Compute<T>;
  const int64_t head = row / op.num_queries % op.num_heads;
  const int64_t sample = row / op.num_queries / op.num_heads;
  const T* scores =
      static_cast<const T*>(op.scores) + row * op.num_keys + range.begin;
  const C* mask = op.mask == nullptr
                      ? nullptr
                      : static_cast<const C*>(op.mask) +
                            sample * op.mask_batch_stride +
                            head * op.mask_head_stride +
                            query * op.mask_query_stride + range.begin;
  const C scale = static_cast<C>(op.scale);
  const C slope =
      op.slopes == nullptr ? C(0) : static_cast<const C*>(op.slopes)[head];
  const C distance = static_cast<C>(query + op.num_keys - op.num_queries -
                                    range.begin);  // to the first key
  const int64_t num_seen = range.end - range.begin;
  Vec<C> numbers;
  for (int i = 0; i < kLanes<C>; ++i) numbers[i] = static_cast<C>(i);
  return sweep_max<C>(num, kMinusInfinity<C>, [&](int64_t j, auto count) {
    Vec<C> v = get(scores + j, count) * scale;
    if (mask != nullptr) v += get(mask + j, count);
    if (op.slopes != nullptr) {
      const Vec<C> d = distance - static_cast<C>(j) - numbers;
      v -= slope * (d < C(0) ? -d : d);
    }
    if (j + kLanes<C> > num_seen) {
      v = keep<C>(v, First{static_cast<int>(num_seen - j)}, kMinusInfinity<C>);
    }
    put(values + j, v, count);
    return v;
  });
}

template <typename C>
SMP_INLINE bool has_nan(const C* values, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    if (values[j] != values[j]) return true;
  }
  return false;
}

template <typename T>
void softmax_forward_of(const ScaledMaskedSoftmax& op, int64_t begin,
                        int64_t end) {
  using C = Compute<T>;
  const int64_t n = op.num_keys;
  C* values = static_cast<C*>(__builtin_malloc((n + 1) * sizeof(C)));
  const ColumnHashes<C> hashes(op.dropout, op.y == nullptr ? 0 : n);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t query = row % op.num_queries;
    const KeyRange range =
        visible_keys(query, op.num_queries, n, op.is_causal, op.window);
    T* probs = static_cast<T*>(op.probs) + row * n;
    T* y = op.y == nullptr ? nullptr : static_cast<T*>(op.y) + row * n;
    const int64_t num = num_worked_on<C>(range, n);
    const C max = masked_scores<T>(op, row, query, range, num, values);
    if (max == kMinusInfinity<C> && !has_nan(values, num)) {  // nothing to see
      fill_zero(probs, 0, n);
      if (y != nullptr) fill_zero(y, 0, n);
      continue;
    }
    C sum;
    sweep_sums<C, 1>(num, &sum, [&](int64_t j, auto count, auto& sums) {
      const Vec<C> e =
          keep<C>(exp_of<C>(get(values + j, count) - max), count, C(0));
      put(values + j, e, count);
      sums[0] += e;
    });
    const C factor = C(1) / sum;
    const RowKey key = row_key(op.dropout.seed, static_cast<uint64_t>(row));
    fill_zero(probs, 0, range.begin);
    fill_zero(probs, range.begin + num, n);
    if (y == nullptr) {
      sweep<C>(num, [&](int64_t j, auto count) {
        put(probs + range.begin + j, get(values + j, count) * factor, count);
      });
      continue;
    }
    fill_zero(y, 0, range.begin);
    fill_zero(y, range.begin + num, n);
    sweep<C>(num, [&](int64_t j, auto count) {
      const int64_t column = range.begin + j;
      const Vec<C> p = get(values + j, count) * factor;
      put(probs + column, p, count);
      put(y + column, drop<C>(p, op.dropout, key, hashes.from(column)), count);
    });
  }
  __builtin_free(values);
}

template <typename T, bool kDrops>
void softmax_backward_of(const ScaledMaskedSoftmaxBackward& op, int64_t begin,
                         int64_t end) {
  using C = Compute<T>;
  const int64_t n = op.num_keys;
  const C scale = static_cast<C>(op.scale);
  C* values =
      kDrops ? static_cast<C*>(__builtin_malloc((n + 1) * sizeof(C))) : nullptr;
  const ColumnHashes<C> hashes(op.dropout, kDrops ? n : 0);
  for (int64_t row = begin; row < end; ++row) {
    const KeyRange range = visible_keys(row % op.num_queries, op.num_queries, n,
                                        op.is_causal, op.window);
    const RowKey key = row_key(op.dropout.seed, static_cast<uint64_t>(row));
    const T* dy = static_cast<const T*>(op.dy) + row * n + range.begin;
    const T* probs = static_cast<const T*>(op.probs) + row * n + range.begin;
    T* dscores = static_cast<T*>(op.dscores) + row * n;
    // Keys past the range have probabilities 0.
    const int64_t num = num_worked_on<C>(range, n);
    C sum;
    sweep_sums<C, 1>(num, &sum, [&](int64_t j, auto count, auto& sums) {
      Vec<C> d = get(dy + j, count);
      if constexpr (kDrops) {
        d = drop<C>(d, op.dropout, key, hashes.from(range.begin + j));
        put(values + j, d, count);
      }
      sums[0] += d * get(probs + j, count);
    });
    fill_zero(dscores, 0, range.begin);
    fill_zero(dscores, range.begin + num, n);
    sweep<C>(num, [&](int64_t j, auto count) {
      const Vec<C> p = get(probs + j, count) * scale;
      const Vec<C> d = kDrops ? get(values + j, count) : get(dy + j, count);
      put(dscores + range.begin + j, (d - sum) * p, count);
    });
  }
  __builtin_free(values);
}

inline void softmax_forward(const ScaledMaskedSoftmax& op, int64_t begin,
                            int64_t end) {
  with_type(op.dtype, [&](auto element) {
    softmax_forward_of<decltype(element)>(op, begin, end);
  });
}

inline void softmax_backward(const ScaledMaskedSoftmaxBackward& op,
                             int64_t begin, int64_t end) {
  with_type(op.dtype, [&](auto element) {
    using T = decltype(element);
    op.dropout.threshold != 0 ? softmax_backward_of<T, true>(op, begin, end)
                              : softmax_backward_of<T, false>(op, begin, end);
  });
}

// ---- Cross entropy

template <typename T>
void cross_entropy_forward_of(const CrossEntropy& op, int64_t begin,
                              int64_t end) {
  using C = Compute<T>;
  const int64_t n = op.num_columns;
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = static_cast<const T*>(op.logits) + row * op.row_stride;
    const C max = sweep_max<C>(
        n, kMinusInfinity<C>,
        [&](int64_t j, auto count) { return get(logits + j, count); });
    C exp_sum, sum = 0;
    if (op.sum != nullptr) {
      C totals[2];
      sweep_sums<C, 2>(n, totals, [&](int64_t j, auto count, auto& sums) {
        const Vec<C> v =
            keep<C>(get(logits + j, count) - max, count, kMinusInfinity<C>);
        sums[0] += exp_of<C>(v);
        sums[1] += keep<C>(v, count, C(0));
      });
      exp_sum = totals[0];
      sum = totals[1];
      static_cast<C*>(op.sum)[row] = sum;
    } else {
      sweep_sums<C, 1>(n, &exp_sum, [&](int64_t j, auto count, auto& sums) {
        sums[0] += exp_of<C>(
            keep<C>(get(logits + j, count) - max, count, kMinusInfinity<C>));
      });
    }
    const int64_t number = op.targets[row];
    const int64_t target = number - op.first_column;
    C target_logit = 0;
    if (number != op.ignore_index) {
      if (number < 0 || number >= op.vocab_size) {
        target_logit = static_cast<C>(__builtin_nanf(""));
      } else if (target >= 0 && target < n) {
        target_logit = get(logits + target, First{1})[0] - max;
      }
    }
    static_cast<C*>(op.max)[row] = max;
    static_cast<C*>(op.exp_sum)[row] = exp_sum;
    static_cast<C*>(op.target_logit)[row] = target_logit;
  }
}

template <typename T>
void cross_entropy_backward_of(const CrossEntropyBackward& op, int64_t begin,
                               int64_t end) {
  using C = Compute<T>;
  const int64_t n = op.num_columns;
  const C smoothing = static_cast<C>(op.label_smoothing);
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = static_cast<const T*>(op.logits) + row * op.row_stride;
    T* dlogits = static_cast<T*>(op.dlogits) + row * n;
    if (op.targets[row] == op.ignore_index) {
      fill_zero(dlogits, 0, n);
      continue;
    }
    const C max = static_cast<const C*>(op.max)[row];
    const C dloss = static_cast<const C*>(op.dloss)[row];
    const C factor = dloss / static_cast<const C*>(op.exp_sum)[row];
    const C spread = dloss * smoothing / static_cast<C>(op.vocab_size);
    const int64_t target = op.targets[row] - op.first_column;
    const bool is_here = target >= 0 && target < n;
    Vec<C> of_target{};
    if (is_here) of_target = get(logits + target, First{1});
    sweep<C>(n, [&](int64_t j, auto count) {
      const Vec<C> e = exp_of<C>(get(logits + j, count) - max);
      put(dlogits + j, e * factor - spread, count);
    });
    if (is_here) {
      const Vec<C> e = exp_of<C>(of_target - max);
      put(dlogits + target, e * factor - spread - dloss * (C(1) - smoothing),
          First{1});
    }
  }
}

inline void cross_entropy_forward(const CrossEntropy& op, int64_t begin,
                                  int64_t end) {
  with_type(op.dtype, [&](auto element) {
    cross_entropy_forward_of<decltype(element)>(op, begin, end);
  });
}

inline void cross_entropy_backward(const CrossEntropyBackward& op,
                                   int64_t begin, int64_t end) {
  with_type(op.dtype, [&](auto element) {
    cross_entropy_backward_of<decltype(element)>(op, begin, end);
  });
}

}  // namespace smp::kernels::cpu::SMP_ISA
