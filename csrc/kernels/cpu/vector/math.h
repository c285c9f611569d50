#pragma once

#include "csrc/kernels/cpu/vector/lanes.h"

// exp and the normal distribution for vectors, to about one unit in the last
// place; square roots.

namespace smp::kernels::cpu::SMP_ISA {

template <typename C>
SMP_INLINE Vec<C> root_of(Vec<C> v) {
#if SMP_VECTOR_BYTES == 64
  if constexpr (sizeof(C) == 4) {
    return _mm512_sqrt_ps(v);
  } else {
    return _mm512_sqrt_pd(v);
  }
#elif SMP_VECTOR_BYTES == 32
  if constexpr (sizeof(C) == 4) {
    return _mm256_sqrt_ps(v);
  } else {
    return _mm256_sqrt_pd(v);
  }
#else
  for (int i = 0; i < kLanes<C>; ++i) {
    v[i] = sizeof(C) == 4 ? __builtin_sqrtf(v[i]) : __builtin_sqrt(v[i]);
  }
  return v;
#endif
}

// c[0] + c[1] x + ...
template <typename C, int kNum>
SMP_INLINE Vec<C> polynomial(const C (&c)[kNum], Vec<C> x) {
  Vec<C> sum = splat<C>(c[kNum - 1]);
#pragma GCC unroll 32
  for (int i = kNum - 2; i >= 0; --i) sum = sum * x + c[i];
  return sum;
}

template <typename C>
struct ExpConstants;

// Coefficients of (exp(r) - 1 - r) / r^2 from Cephes (Moshier).
template <>
struct ExpConstants<float> {
  static constexpr float kLowest = -104.0f;  // exp is 0 below
  static constexpr float kHighest = 89.0f;   // and infinite above
  static constexpr float kRound = 0x1.8p23f;
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440e-4f;
  static constexpr int kBias = 127;
  static constexpr int kFractionBits = 23;
  static constexpr float kSeries[] = {5.0000001201e-1f, 1.6666665459e-1f,
                                      4.1665795894e-2f, 8.3334519073e-3f,
                                      1.3981999507e-3f, 1.9875691500e-4f};
};

// Taylor series: the term after the last is below 4e-18.
template <>
struct ExpConstants<double> {
  static constexpr double kLowest = -746.0;
  static constexpr double kHighest = 710.0;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 6.93147180369123816490e-01;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  static constexpr int kBias = 1023;
  static constexpr int kFractionBits = 52;
  static constexpr double kSeries[] = {
      1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,
      1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
      1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
};

// y * 2^n; `shifted` is n + kRound.
template <typename C>
SMP_INLINE Vec<C> scale_by_power(Vec<C> y, Vec<C> n, Vec<C> shifted) {
#if SMP_VECTOR_BYTES == 64
  (void)shifted;
  if constexpr (sizeof(C) == 4) {
    return _mm512_scalef_ps(y, n);
  } else {
    return _mm512_scalef_pd(y, n);
  }
#else
  // In two halves, so that subnormal results and infinity come out right.
  using K = ExpConstants<C>;
  (void)n;
  const Int<C> whole =
      bits_as<Int<C>>(shifted) - bits_as<Int<C>>(splat<C>(K::kRound));
  const Int<C> half = whole >> 1;
  const Int<C> first = (half + K::kBias) << K::kFractionBits;
  const Int<C> second = (whole - half + K::kBias) << K::kFractionBits;
  return y * bits_as<Vec<C>>(first) * bits_as<Vec<C>>(second);
#endif
}

/// Returns e^x; without kMayBePositive for x <= 0 only.
template <typename C, bool kMayBePositive = false>
SMP_INLINE Vec<C> exp_of(Vec<C> x) {
  using K = ExpConstants<C>;
  // Results that round to zero are not computed: some processors take a hundred
  // times longer for them, and masked scores are full of them. NaN stays.
  const auto vanishes = x < splat<C>(K::kLowest);
  x = vanishes ? Vec<C>{} : x;
  if constexpr (kMayBePositive) x = smaller<C>(splat<C>(K::kHighest), x);
  const Vec<C> shifted = x * C(1.44269504088896340736) + K::kRound;
  const Vec<C> n = shifted - K::kRound;
  const Vec<C> r = (x - n * K::kLn2High) - n * K::kLn2Low;
  const Vec<C> y = polynomial(K::kSeries, r) * (r * r) + r + C(1);
  const Vec<C> result = scale_by_power<C>(y, n, shifted);
  return vanishes ? Vec<C>{} : result;
}

// Coefficients of exp(z^2) erfc(z) = u P(1 - 2 k u) with u = 1 / (z + k),
// interpolated at Chebyshev nodes to a relative error of 7e-9 for float and
// 6e-18 for double. 16 bits need less: 2e-5.
template <typename T>
struct TailConstants {
  static_assert(sizeof(T) == 2);
  static constexpr float kShift = 1.5f;
  static constexpr float kSeries[] = {0.964746726f,    -0.507762488f,
                                      0.0757754308f,   0.0468935078f,
                                      -0.00858883362f, -0.00722085497f};
};

template <>
struct TailConstants<float> {
  static constexpr float kShift = 3;
  static constexpr float kSeries[] = {
      1.0740069058f,      -0.88339446375f,   0.5902284472f,     -0.31046651801f,
      0.11952707769f,     -0.026837425745f,  -0.0012172093229f, 0.003079632147f,
      -0.00049714223771f, -0.00033315035514f};
};

template <>
struct TailConstants<double> {
  static constexpr double kShift = 4;
  static constexpr double kSeries[] = {
      1.0959956610004911179,     -0.97654872908088211676,
      0.77320870226523759081,    -0.54085383131322101419,
      0.33085158787798035173,    -0.1740109372404169259,
      0.076381514910057201871,   -0.026370053332646058729,
      0.0061120556471550790021,  -0.00028095893357053461598,
      -0.0004550526311160191479, 0.00017681318595842696497,
      -3.6353562418993661899e-6, -0.000018862143490072931281,
      4.6947697896021431748e-6,  1.4269265704586864204e-6,
      -8.4651040780346518568e-7, -7.9178971393854472298e-8,
      1.241272398342856243e-7,   3.5841942803371226101e-9,
      -1.5230550877651046602e-8, -7.2262257208456537162e-10,
      8.8126830433085195853e-10};
};

/// Returns the normal distribution function of x, as precise as elements of
/// type T are; `exponential` becomes exp(-x^2 / 2).
template <typename T, typename C = Compute<T>>
SMP_INLINE Vec<C> normal_cdf(Vec<C> x, Vec<C>* exponential) {
  using K = TailConstants<T>;
  const Vec<C> absolute = x < C(0) ? -x : x;
  const Vec<C> e = exp_of<C>(x * x * C(-0.5));
  const Vec<C> u = C(1) / (absolute * C(0.70710678118654752440) + K::kShift);
  const Vec<C> t = C(1) - u * (2 * K::kShift);
  const Vec<C> tail = polynomial(K::kSeries, t) * u * e * C(0.5);
  *exponential = e;
  return x < C(0) ? tail : C(1) - tail;
}

}  // namespace smp::kernels::cpu::SMP_ISA
