#pragma once

#include "csrc/kernels/cpu/vector/math.h"
#include "csrc/kernels/multi_array.h"

// Sums, maxima and products over parts of arrays.

namespace smp::kernels::cpu::SMP_ISA {

// The two halves of a vector of floats, as doubles.
SMP_INLINE void as_doubles(FloatVec v, Vec<double>* low, Vec<double>* high) {
#if SMP_VECTOR_BYTES == 64
  *low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
  *high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#elif SMP_VECTOR_BYTES == 32
  *low = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
  *high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#else
  constexpr int kHalf = kLanes<double>;
  for (int i = 0; i < kHalf; ++i) {
    (*low)[i] = v[i];
    (*high)[i] = v[i + kHalf];
  }
#endif
}

SMP_INLINE Vec<double> squares(Vec<double> v) { return v * v; }

SMP_INLINE Vec<double> squares(FloatVec v) {
  Vec<double> low, high;
  as_doubles(v, &low, &high);
  return low * low + high * high;
}

template <typename T>
double sum_of_squares_of(const T* x, int64_t n) {
  using C = Compute<T>;
  // A core reads several places at once faster than one: each has a prefetcher
  // of its own.
  constexpr int kPlaces = 8;
  constexpr int64_t kAhead = 512 / sizeof(T);
  Vec<double> sums[kPlaces] = {};
  const int64_t part = n / kPlaces / kLanes<C> * kLanes<C>;
  for (int64_t j = 0; j < part; j += kLanes<C>) {
#pragma GCC unroll 8
    for (int place = 0; place < kPlaces; ++place) {
      const T* p = x + place * part + j;
      __builtin_prefetch(p + kAhead);
      sums[place] += squares(get(p, All{}));
    }
  }
  const T* rest = x + kPlaces * part;
  sweep<C>(n - kPlaces * part, [&](int64_t j, auto count) {
    sums[0] += squares(keep<C>(get(rest + j, count), count, C(0)));
  });
  for (int half = kPlaces / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sum_of_lanes<double>(sums[0]);
}

inline double sum_of_squares(const Array& array, int64_t begin, int64_t end) {
  double sum = 0;
  with_type(array.dtype, [&](auto element) {
    using T = decltype(element);
    sum = sum_of_squares_of(static_cast<const T*>(array.data) + begin,
                            end - begin);
  });
  return sum;
}

template <typename T>
double max_abs_of(const T* x, int64_t n) {
  using C = Compute<T>;
  Int<C> nans = {};
  const C max = sweep_max<C>(n, C(0), [&](int64_t j, auto count) {
    const Vec<C> v = keep<C>(get(x + j, count), count, C(0));
    nans |= v != v;
    return v < C(0) ? -v : v;
  });
  for (int i = 0; i < kLanes<C>; ++i) {
    if (nans[i] != 0) return __builtin_nan("");
  }
  return static_cast<double>(max);
}

inline double max_abs(const Array& array, int64_t begin, int64_t end) {
  double max = 0;
  with_type(array.dtype, [&](auto element) {
    using T = decltype(element);
    max = max_abs_of(static_cast<const T*>(array.data) + begin, end - begin);
  });
  return max;
}

template <typename T>
void scale_of(T* x, int64_t n, double factor) {
  using C = Compute<T>;
  const C f = static_cast<C>(factor);
  sweep<C>(n, [&](int64_t j, auto count) {
    put(x + j, get(x + j, count) * f, count);
  });
}

inline void scale(const Array& array, double factor, int64_t begin,
                  int64_t end) {
  with_type(array.dtype, [&](auto element) {
    using T = decltype(element);
    scale_of(static_cast<T*>(array.data) + begin, end - begin, factor);
  });
}

}  // namespace smp::kernels::cpu::SMP_ISA
