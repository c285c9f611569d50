#pragma once

#include "csrc/kernels/cpu/vector/dropout.h"
#include "csrc/kernels/cpu/vector/math.h"
#include "csrc/kernels/elementwise.h"

namespace smp::kernels::cpu::SMP_ISA {

// ---- GELU

template <typename C>
constexpr C kTanhScale = C(1.59576912160573071176);  // 2 sqrt(2 / pi)
template <typename C>
constexpr C kTanhCubic = C(0.044715);

template <bool kIsTanh, typename T, typename C = Compute<T>>
SMP_INLINE Vec<C> gelu_of(Vec<C> x) {
  if constexpr (kIsTanh) {
    // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
    const Vec<C> u = x * kTanhScale<C> * (C(1) + kTanhCubic<C> * (x * x));
    return x / (C(1) + exp_of<C, true>(-u));
  } else {
    Vec<C> exponential;
    return x * normal_cdf<T>(x, &exponential);
  }
}

template <bool kIsTanh, typename T, typename C = Compute<T>>
SMP_INLINE Vec<C> gelu_slope(Vec<C> x) {
  if constexpr (kIsTanh) {
    const Vec<C> square = x * x;
    Vec<C> u = x * kTanhScale<C> * (C(1) + kTanhCubic<C> * square);
    u = larger<C>(splat<C>(C(-80)), u);  // keeps e finite
    const Vec<C> e = exp_of<C, true>(-u);
    const Vec<C> s = C(1) / (C(1) + e);  // and 1 - s = e s
    const Vec<C> du = kTanhScale<C> * (C(1) + (3 * kTanhCubic<C>)*square);
    return s + x * s * (e * s) * du;
  } else {
    Vec<C> exponential;
    const Vec<C> cdf = normal_cdf<T>(x, &exponential);
    return cdf + x * exponential * C(0.39894228040143267794);
  }
}

template <typename T, bool kIsTanh>
void gelu_forward_of(const BiasGelu& op, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t n = op.num_columns;
  const auto* bias = static_cast<const C*>(op.bias);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(op.x) + row * n;
    T* y = static_cast<T*>(op.result) + row * n;
    sweep<C>(n, [&](int64_t j, auto count) {
      Vec<C> v = get(x + j, count);
      if (bias != nullptr) v += get(bias + j, count);
      put(y + j, gelu_of<kIsTanh, T>(v), count);
    });
  }
}

template <typename T, bool kIsTanh>
void gelu_backward_of(const BiasGelu& op, int64_t begin, int64_t end,
                      Compute<T>* dbias) {
  using C = Compute<T>;
  const int64_t n = op.num_columns;
  const auto* bias = static_cast<const C*>(op.bias);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(op.x) + row * n;
    const T* dy = static_cast<const T*>(op.dy) + row * n;
    T* dx = static_cast<T*>(op.result) + row * n;
    sweep<C>(n, [&](int64_t j, auto count) {
      Vec<C> v = get(x + j, count);
      if (bias != nullptr) v += get(bias + j, count);
      const Vec<C> d = get(dy + j, count) * gelu_slope<kIsTanh, T>(v);
      put(dx + j, d, count);
      if (dbias != nullptr) put(dbias + j, get(dbias + j, count) + d, count);
    });
  }
}

inline void bias_gelu_forward(const BiasGelu& op, int64_t begin, int64_t end) {
  with_type(op.dtype, [&](auto element) {
    using T = decltype(element);
    op.is_tanh ? gelu_forward_of<T, true>(op, begin, end)
               : gelu_forward_of<T, false>(op, begin, end);
  });
}

inline void bias_gelu_backward(const BiasGelu& op, int64_t begin, int64_t end,
                               void* dbias) {
  with_type(op.dtype, [&](auto element) {
    using T = decltype(element);
    auto* sums = static_cast<Compute<T>*>(dbias);
    op.is_tanh ? gelu_backward_of<T, true>(op, begin, end, sums)
               : gelu_backward_of<T, false>(op, begin, end, sums);
  });
}

// ---- Dropout

template <typename T, typename Y, bool kDrops>
void dropout_forward_of(const BiasDropoutResidual& op, int64_t begin,
                        int64_t end) {
  using C = Compute<T>;
  const int64_t n = op.num_columns;
  const auto* bias = static_cast<const C*>(op.bias);
  const ColumnHashes<C> hashes(op.dropout, kDrops ? n : 0);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(op.x) + row * n;
    const Y* residual = op.residual == nullptr
                            ? nullptr
                            : static_cast<const Y*>(op.residual) + row * n;
    Y* y = static_cast<Y*>(op.y) + row * n;
    const RowKey key = row_key(op.dropout.seed, static_cast<uint64_t>(row));
    sweep<C>(n, [&](int64_t j, auto count) {
      Vec<C> v = get(x + j, count);
      if (bias != nullptr) v += get(bias + j, count);
      if constexpr (kDrops) v = drop<C>(v, op.dropout, key, hashes.from(j));
      if (residual != nullptr) v += get(residual + j, count);
      put(y + j, v, count);
    });
  }
}

template <typename T, typename Y, bool kDrops>
void dropout_backward_of(const BiasDropoutResidualBackward& op, int64_t begin,
                         int64_t end, Compute<T>* dbias) {
  using C = Compute<T>;
  const int64_t n = op.num_columns;
  const ColumnHashes<C> hashes(op.dropout, kDrops ? n : 0);
  for (int64_t row = begin; row < end; ++row) {
    const Y* dy = static_cast<const Y*>(op.dy) + row * n;
    T* dx = static_cast<T*>(op.dx) + row * n;
    const RowKey key = row_key(op.dropout.seed, static_cast<uint64_t>(row));
    sweep<C>(n, [&](int64_t j, auto count) {
      Vec<C> d = get(dy + j, count);
      if constexpr (kDrops) d = drop<C>(d, op.dropout, key, hashes.from(j));
      put(dx + j, d, count);
      if (dbias != nullptr) put(dbias + j, get(dbias + j, count) + d, count);
    });
  }
}

// Calls function(T{}, Y{}) with the types of x and y: one type, or 16 bits and
// float.
template <typename Function>
SMP_INLINE void with_types(Dtype dtype, Dtype y_dtype, Function&& function) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (sizeof(T) == 2) {
      if (y_dtype == Dtype::kFloat) return function(T{}, float{});
    }
    function(T{}, T{});
  });
}

inline void bias_dropout_residual_forward(const BiasDropoutResidual& op,
                                          int64_t begin, int64_t end) {
  with_types(op.dtype, op.y_dtype, [&](auto element, auto y_element) {
    using T = decltype(element);
    using Y = decltype(y_element);
    op.dropout.threshold != 0 ? dropout_forward_of<T, Y, true>(op, begin, end)
                              : dropout_forward_of<T, Y, false>(op, begin, end);
  });
}

inline void bias_dropout_residual_backward(
    const BiasDropoutResidualBackward& op, int64_t begin, int64_t end,
    void* dbias) {
  with_types(op.dtype, op.y_dtype, [&](auto element, auto y_element) {
    using T = decltype(element);
    using Y = decltype(y_element);
    auto* sums = static_cast<Compute<T>*>(dbias);
    op.dropout.threshold != 0
        ? dropout_backward_of<T, Y, true>(op, begin, end, sums)
        : dropout_backward_of<T, Y, false>(op, begin, end, sums);
  });
}

}  // namespace smp::kernels::cpu::SMP_ISA
