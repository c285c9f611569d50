#pragma once

#include "csrc/kernels/cpu/vector/lanes.h"
#include "csrc/kernels/elementwise.h"

namespace smp::kernels::cpu::SMP_ISA {

template <typename T>
SMP_INLINE void rotate_halves(const T* x, const Compute<T>* cos,
                              const Compute<T>* sin, Compute<T> sign,
                              int64_t pairs, T* y) {
  using C = Compute<T>;
  sweep<C>(pairs, [&](int64_t j, auto count) {
    const Vec<C> a = get(x + j, count);
    const Vec<C> b = get(x + pairs + j, count);
    const Vec<C> c = get(cos + j, count);
    const Vec<C> s = get(sin + j, count) * sign;
    put(y + j, a * c - b * s, count);
    put(y + pairs + j, b * c + a * s, count);
  });
}

// Lane i of a pair of vectors (a, b), for __builtin_shuffle.
template <typename C>
struct Pairs {
  // 0 0 1 1 ... of the first or second half of the lanes
  static SMP_INLINE Int<C> doubled(int first) {
    Int<C> lanes;
    for (int i = 0; i < kLanes<C>; ++i) lanes[i] = first + i / 2;
    return lanes;
  }
  // 1 0 3 2 ...
  static SMP_INLINE Int<C> swapped() {
    Int<C> lanes;
    for (int i = 0; i < kLanes<C>; ++i) lanes[i] = i ^ 1;
    return lanes;
  }
  // -1 1 -1 1 ...
  static SMP_INLINE Vec<C> signs(C sign) {
    Vec<C> result;
    for (int i = 0; i < kLanes<C>; ++i) result[i] = i % 2 == 0 ? -sign : sign;
    return result;
  }
};

template <typename T>
SMP_INLINE void rotate_neighbours(const T* x, const Compute<T>* cos,
                                  const Compute<T>* sin, Compute<T> sign,
                                  int64_t pairs, T* y) {
  using C = Compute<T>;
  constexpr int kStep = kLanes<C>;
  const Int<C> swapped = Pairs<C>::swapped();
  const Int<C> low = Pairs<C>::doubled(0);
  const Int<C> high = Pairs<C>::doubled(kStep / 2);
  const Vec<C> signs = Pairs<C>::signs(sign);
  int64_t j = 0;
  for (; j + kStep <= pairs; j += kStep) {
    const Vec<C> c = load(cos + j);
    const Vec<C> s = load(sin + j);
    const Vec<C> first = load(x + 2 * j);
    const Vec<C> second = load(x + 2 * j + kStep);
    store(y + 2 * j, first * __builtin_shuffle(c, low) +
                         __builtin_shuffle(first, swapped) * signs *
                             __builtin_shuffle(s, low));
    store(y + 2 * j + kStep, second * __builtin_shuffle(c, high) +
                                 __builtin_shuffle(second, swapped) * signs *
                                     __builtin_shuffle(s, high));
  }
  for (; j < pairs; j += kStep / 2) {
    // Half a vector of pairs at a time.
    const int rest = static_cast<int>(pairs - j);
    const First angles{rest < kStep / 2 ? rest : kStep / 2};
    const First features{2 * angles.count};
    const Vec<C> c = __builtin_shuffle(get(cos + j, angles), low);
    const Vec<C> s = __builtin_shuffle(get(sin + j, angles), low);
    const Vec<C> v = get(x + 2 * j, features);
    put(y + 2 * j, v * c + __builtin_shuffle(v, swapped) * signs * s, features);
  }
}

template <typename T>
void rotary_of(const Rotary& op, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const C sign = op.is_inverse ? C(-1) : C(1);
  const int64_t rotated = 2 * op.num_pairs;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t sample = row / op.length;
    const int64_t position = row % op.length;
    const int64_t angle =
        (op.is_table_per_sample ? row : position) * op.num_pairs;
    const C* cos = static_cast<const C*>(op.cos) + angle;
    const C* sin = static_cast<const C*>(op.sin) + angle;
    for (int64_t head = 0; head < op.num_heads; ++head) {
      const T* x = static_cast<const T*>(op.x) + sample * op.batch_stride +
                   position * op.length_stride + head * op.head_stride;
      T* y = static_cast<T*>(op.y) + (row * op.num_heads + head) * op.head_size;
      op.is_interleaved
          ? rotate_neighbours<T>(x, cos, sin, sign, op.num_pairs, y)
          : rotate_halves<T>(x, cos, sin, sign, op.num_pairs, y);
      for (int64_t j = rotated; j < op.head_size; ++j) y[j] = x[j];
    }
  }
}

inline void rotary(const Rotary& op, int64_t begin, int64_t end) {
  with_type(op.dtype, [&](auto element) {
    rotary_of<decltype(element)>(op, begin, end);
  });
}

}  // namespace smp::kernels::cpu::SMP_ISA
