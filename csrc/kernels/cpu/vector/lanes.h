#pragma once

#include <cstdint>

#include "csrc/kernels/cpu/float16.h"
#include "csrc/kernels/cpu/vector/isa.h"
#include "csrc/kernels/multi_array.h"

#if SMP_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

// Vectors of float and double, and how rows of any dtype are walked with them.

namespace smp::kernels::cpu::SMP_ISA {

template <typename Compute>
struct Types;
template <>
struct Types<float> {
  typedef float Vec __attribute__((vector_size(SMP_VECTOR_BYTES)));
  typedef int32_t Int __attribute__((vector_size(SMP_VECTOR_BYTES)));
  typedef uint32_t Word __attribute__((vector_size(SMP_VECTOR_BYTES)));
};
template <>
struct Types<double> {
  typedef double Vec __attribute__((vector_size(SMP_VECTOR_BYTES)));
  typedef int64_t Int __attribute__((vector_size(SMP_VECTOR_BYTES)));
  typedef uint32_t Word __attribute__((vector_size(SMP_VECTOR_BYTES / 2)));
};

template <typename Compute>
using Vec = typename Types<Compute>::Vec;
template <typename Compute>
using Int = typename Types<Compute>::Int;
// One 32-bit word per lane.
template <typename Compute>
using Word = typename Types<Compute>::Word;

template <typename Compute>
constexpr int kLanes = SMP_VECTOR_BYTES / sizeof(Compute);

template <typename T>
struct ComputeType {
  using type = T;
};
template <>
struct ComputeType<Half> {
  using type = float;
};
template <>
struct ComputeType<BFloat16> {
  using type = float;
};
template <typename T>
using Compute = typename ComputeType<T>::type;

typedef uint16_t Bits16 __attribute__((vector_size(SMP_VECTOR_BYTES / 2)));
using FloatVec = Vec<float>;
using FloatWord = Word<float>;

template <typename To, typename From>
SMP_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename C>
SMP_INLINE Vec<C> splat(C value) {
  return Vec<C>{} + value;
}

// Returns 0, 1, 2, ... as numbers.
template <typename C>
SMP_INLINE Int<C> lane_numbers() {
  Int<C> result;
  for (int i = 0; i < kLanes<C>; ++i) result[i] = i;
  return result;
}

// ---- Whole vectors of elements, computed in float or double.

SMP_INLINE FloatVec load(const float* p) {
  FloatVec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

SMP_INLINE Vec<double> load(const double* p) {
  Vec<double> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

SMP_INLINE FloatVec widen(Bits16 bits, BFloat16) {
#if SMP_VECTOR_BYTES == 64
  const auto word =
      bits_as<FloatWord>(_mm512_cvtepu16_epi32(bits_as<__m256i>(bits)));
#elif SMP_VECTOR_BYTES == 32
  const auto word =
      bits_as<FloatWord>(_mm256_cvtepu16_epi32(bits_as<__m128i>(bits)));
#else
  const FloatWord word = __builtin_convertvector(bits, FloatWord);
#endif
  return bits_as<FloatVec>(word << 16);
}

SMP_INLINE FloatVec widen(Bits16 bits, Half) {
#if SMP_VECTOR_BYTES == 64
  return _mm512_cvtph_ps(bits_as<__m256i>(bits));
#elif SMP_VECTOR_BYTES == 32
  return _mm256_cvtph_ps(bits_as<__m128i>(bits));
#else
  // See to_float in float16.h.
  const FloatWord word = __builtin_convertvector(bits, FloatWord);
  const FloatWord rest = (word & 0x7fffu) << 13;
  const FloatVec scaled = bits_as<FloatVec>(rest) * 0x1p112f;
  const FloatWord magnitude = (word & 0x7c00u) == 0x7c00u
                                  ? (rest | 0x7f800000u)
                                  : bits_as<FloatWord>(scaled);
  return bits_as<FloatVec>(((word & 0x8000u) << 16) | magnitude);
#endif
}

SMP_INLINE Bits16 narrow(FloatVec v, BFloat16) {
#if SMP_VECTOR_BYTES == 64 && defined(__AVX512BF16__)
  return bits_as<Bits16>(_mm512_cvtneps_pbh(v));
#else
  const FloatWord word = bits_as<FloatWord>(v);
  const FloatWord rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  const FloatWord result = v != v ? FloatWord{} + 0x7fc0u : rounded;
  return __builtin_convertvector(result, Bits16);
#endif
}

SMP_INLINE Bits16 narrow(FloatVec v, Half) {
#if SMP_VECTOR_BYTES == 64
  return bits_as<Bits16>(
      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif SMP_VECTOR_BYTES == 32
  return bits_as<Bits16>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  // See to_half in float16.h.
  const FloatWord word = bits_as<FloatWord>(v);
  const FloatWord magnitude = word & 0x7fffffffu;
  const FloatVec aligned = bits_as<FloatVec>(magnitude) + 0.5f;
  const FloatWord subnormal = bits_as<FloatWord>(aligned) - 0x3f000000u;
  const FloatWord normal =
      (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  FloatWord result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x47800000u ? FloatWord{} + 0x7c00u : result;
  result = magnitude > 0x7f800000u ? FloatWord{} + 0x7e00u : result;
  result |= (word >> 16) & 0x8000u;
  return __builtin_convertvector(result, Bits16);
#endif
}

template <typename T>
SMP_INLINE FloatVec load(const T* p) {
  static_assert(sizeof(T) == 2);
  Bits16 bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return widen(bits, T{});
}

SMP_INLINE void store(float* p, FloatVec v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

SMP_INLINE void store(double* p, Vec<double> v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

template <typename T>
SMP_INLINE void store(T* p, FloatVec v) {
  static_assert(sizeof(T) == 2);
  const Bits16 bits = narrow(v, T{});
  __builtin_memcpy(p, &bits, sizeof(bits));
}

// ---- Whole vectors and the first elements of one, by the same names.

struct All {};
struct First {
  int count;
};

template <typename T>
SMP_INLINE Vec<Compute<T>> get(const T* p, All) {
  return load(p);
}

template <typename T>
SMP_INLINE void put(T* p, Vec<Compute<T>> v, All) {
  store(p, v);
}

#if SMP_VECTOR_BYTES == 64

template <typename T>
SMP_INLINE Vec<Compute<T>> get(const T* p, First first) {
  const uint32_t mask = (1u << first.count) - 1;
  if constexpr (sizeof(T) == 8) {
    return _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask), p);
  } else if constexpr (sizeof(T) == 4) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
  } else {
    return widen(bits_as<Bits16>(
                     _mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p)),
                 T{});
  }
}

template <typename T>
SMP_INLINE void put(T* p, Vec<Compute<T>> v, First first) {
  const uint32_t mask = (1u << first.count) - 1;
  if constexpr (sizeof(T) == 8) {
    _mm512_mask_storeu_pd(p, static_cast<__mmask8>(mask), v);
  } else if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(mask), v);
  } else {
    _mm256_mask_storeu_epi16(p, static_cast<__mmask16>(mask),
                             bits_as<__m256i>(narrow(v, T{})));
  }
}

#else

template <typename T>
SMP_INLINE Vec<Compute<T>> get(const T* p, First first) {
#if SMP_VECTOR_BYTES == 32
  const auto mask = lane_numbers<Compute<T>>() < first.count;
  if constexpr (sizeof(T) == 8) {
    return _mm256_maskload_pd(p, bits_as<__m256i>(mask));
  } else if constexpr (sizeof(T) == 4) {
    return _mm256_maskload_ps(p, bits_as<__m256i>(mask));
  }
#endif
  T elements[kLanes<Compute<T>>] = {};
  for (int i = 0; i < first.count; ++i) elements[i] = p[i];
  return load(elements);
}

template <typename T>
SMP_INLINE void put(T* p, Vec<Compute<T>> v, First first) {
#if SMP_VECTOR_BYTES == 32
  const auto mask = lane_numbers<Compute<T>>() < first.count;
  if constexpr (sizeof(T) == 8) {
    return _mm256_maskstore_pd(p, bits_as<__m256i>(mask), v);
  } else if constexpr (sizeof(T) == 4) {
    return _mm256_maskstore_ps(p, bits_as<__m256i>(mask), v);
  }
#endif
  T elements[kLanes<Compute<T>>];
  store(elements, v);
  for (int i = 0; i < first.count; ++i) p[i] = elements[i];
}

#endif

// Returns v where there are elements, `neutral` elsewhere.
template <typename C>
SMP_INLINE Vec<C> keep(Vec<C> v, All, C) {
  return v;
}

template <typename C>
SMP_INLINE Vec<C> keep(Vec<C> v, First first, C neutral) {
  return lane_numbers<C>() < first.count ? v : splat<C>(neutral);
}

// Returns the larger of a and b; b if one of them is NaN. Compilers do not make
// one instruction of the comparison, because it treats zeros of both signs
// alike.
template <typename C>
SMP_INLINE Vec<C> larger(Vec<C> a, Vec<C> b) {
#if SMP_VECTOR_BYTES == 64
  if constexpr (sizeof(C) == 4) {
    return _mm512_max_ps(a, b);
  } else {
    return _mm512_max_pd(a, b);
  }
#elif SMP_VECTOR_BYTES == 32
  if constexpr (sizeof(C) == 4) {
    return _mm256_max_ps(a, b);
  } else {
    return _mm256_max_pd(a, b);
  }
#else
  return a > b ? a : b;
#endif
}

template <typename C>
SMP_INLINE Vec<C> smaller(Vec<C> a, Vec<C> b) {
  return -larger<C>(-a, -b);
}

template <typename C>
SMP_INLINE C sum_of_lanes(Vec<C> v) {
  C lanes[kLanes<C>];
  __builtin_memcpy(lanes, &v, sizeof(v));
#pragma GCC unroll 8
  for (int half = kLanes<C> / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

template <typename C>
SMP_INLINE C max_of_lanes(Vec<C> v) {
  C result = v[0];
  for (int i = 1; i < kLanes<C>; ++i) result = v[i] > result ? v[i] : result;
  return result;
}

// ---- Walks over n elements.

/// Calls body(j, All{}) for each whole vector, body(j, First{k}) for the rest.
template <typename C, typename Body>
SMP_INLINE void sweep(int64_t n, Body&& body) {
  int64_t j = 0;
  for (; j + kLanes<C> <= n; j += kLanes<C>) body(j, All{});
  if (j < n) body(j, First{static_cast<int>(n - j)});
}

/// Sums over n elements: body(j, count, sums) adds to `sums`, kNumSums vectors.
/// Four sets of them are summed independently, because an addition has to wait
/// for the addition before it.
template <typename C, int kNumSums, typename Body>
SMP_INLINE void sweep_sums(int64_t n, C* totals, Body&& body) {
  constexpr int kSets = 4;
  constexpr int kStep = kLanes<C>;
  Vec<C> sums[kSets][kNumSums] = {};
  int64_t j = 0;
  for (; j + kSets * kStep <= n; j += kSets * kStep) {
#pragma GCC unroll 4
    for (int set = 0; set < kSets; ++set) {
      body(j + set * kStep, All{}, sums[set]);
    }
  }
  for (; j + kStep <= n; j += kStep) body(j, All{}, sums[0]);
  if (j < n) body(j, First{static_cast<int>(n - j)}, sums[1]);
  for (int k = 0; k < kNumSums; ++k) {
    totals[k] =
        sum_of_lanes<C>((sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]));
  }
}

/// Returns the largest of value(j, count), and `lowest` if n is 0.
template <typename C, typename Value>
SMP_INLINE C sweep_max(int64_t n, C lowest, Value&& value) {
  constexpr int kStep = kLanes<C>;
  Vec<C> first = splat<C>(lowest);
  Vec<C> second = first;
  int64_t j = 0;
  for (; j + 2 * kStep <= n; j += 2 * kStep) {
    first = larger<C>(value(j, All{}), first);
    second = larger<C>(value(j + kStep, All{}), second);
  }
  for (; j + kStep <= n; j += kStep) {
    first = larger<C>(value(j, All{}), first);
  }
  if (j < n) {
    const First rest{static_cast<int>(n - j)};
    second = larger<C>(keep<C>(value(j, rest), rest, lowest), second);
  }
  return max_of_lanes<C>(larger<C>(first, second));
}

/// Calls function(T{}) with the element type of a dtype.
template <typename Function>
SMP_INLINE void with_type(Dtype dtype, Function&& function) {
  switch (dtype) {
    case Dtype::kFloat:
      return function(float{});
    case Dtype::kDouble:
      return function(double{});
    case Dtype::kHalf:
      return function(Half{});
    case Dtype::kBFloat16:
      return function(BFloat16{});
  }
}

}  // namespace smp::kernels::cpu::SMP_ISA
