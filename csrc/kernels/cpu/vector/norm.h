#pragma once

#include "csrc/kernels/cpu/vector/lanes.h"
#include "csrc/kernels/norm.h"

namespace smp::kernels::cpu::SMP_ISA {

template <typename T>
void norm_forward_of(const Norm& norm, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t n = norm.num_columns;
  const auto* weight = static_cast<const C*>(norm.weight);
  const auto* bias = static_cast<const C*>(norm.bias);
  auto* means = static_cast<C*>(norm.mean);
  auto* rstds = static_cast<C*>(norm.rstd);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(norm.x) + row * n;
    T* y = static_cast<T*>(norm.y) + row * n;
    C mean = 0;
    if (!norm.is_rms) {
      sweep_sums<C, 1>(n, &mean, [&](int64_t j, auto count, auto& sums) {
        sums[0] += get(x + j, count);
      });
      mean /= static_cast<C>(n);
      means[row] = mean;
    }
    C variance;
    sweep_sums<C, 1>(n, &variance, [&](int64_t j, auto count, auto& sums) {
      const Vec<C> d = keep<C>(get(x + j, count) - mean, count, C(0));
      sums[0] += d * d;
    });
    const C squared = variance / static_cast<C>(n) + static_cast<C>(norm.eps);
    const C rstd =
        C(1) / static_cast<C>(sizeof(C) == 4 ? __builtin_sqrtf(squared)
                                             : __builtin_sqrt(squared));
    rstds[row] = rstd;
    sweep<C>(n, [&](int64_t j, auto count) {
      Vec<C> v = (get(x + j, count) - mean) * rstd;
      if (weight != nullptr) v *= get(weight + j, count);
      if (bias != nullptr) v += get(bias + j, count);
      put(y + j, v, count);
    });
  }
}

template <typename T>
void norm_backward_of(const NormBackward& norm, int64_t begin, int64_t end,
                      Compute<T>* dweight, Compute<T>* dbias) {
  using C = Compute<T>;
  const int64_t n = norm.num_columns;
  const auto* weight = static_cast<const C*>(norm.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* dy = static_cast<const T*>(norm.dy) + row * n;
    const T* x = static_cast<const T*>(norm.x) + row * n;
    const C rstd = static_cast<const C*>(norm.rstd)[row];
    const C mean = norm.is_rms ? C(0) : static_cast<const C*>(norm.mean)[row];
    // Sums of dy * weight and of dy * weight * normalised x.
    C totals[2];
    sweep_sums<C, 2>(n, totals, [&](int64_t j, auto count, auto& sums) {
      const Vec<C> d = get(dy + j, count);
      const Vec<C> normalised =
          keep<C>((get(x + j, count) - mean) * rstd, count, C(0));
      const Vec<C> product = d * normalised;
      if (dweight != nullptr) {
        put(dweight + j, get(dweight + j, count) + product, count);
      }
      if (dbias != nullptr) put(dbias + j, get(dbias + j, count) + d, count);
      if (weight != nullptr) {
        const Vec<C> w = get(weight + j, count);
        sums[0] += d * w;
        sums[1] += product * w;
      } else {
        sums[0] += d;
        sums[1] += product;
      }
    });
    if (norm.dx == nullptr) continue;
    T* dx = static_cast<T*>(norm.dx) + row * n;
    // dx = rstd (dy w - a - b (x - mean))
    const C a = norm.is_rms ? C(0) : totals[0] / static_cast<C>(n);
    const C b = totals[1] / static_cast<C>(n) * rstd;
    sweep<C>(n, [&](int64_t j, auto count) {
      Vec<C> d = get(dy + j, count);
      if (weight != nullptr) d *= get(weight + j, count);
      put(dx + j, (d - (get(x + j, count) - mean) * b - a) * rstd, count);
    });
  }
}

inline void norm_forward(const Norm& norm, int64_t begin, int64_t end) {
  with_type(norm.dtype, [&](auto element) {
    norm_forward_of<decltype(element)>(norm, begin, end);
  });
}

inline void norm_backward(const NormBackward& norm, int64_t begin, int64_t end,
                          void* dweight, void* dbias) {
  with_type(norm.dtype, [&](auto element) {
    using T = decltype(element);
    norm_backward_of<T>(norm, begin, end, static_cast<Compute<T>*>(dweight),
                        static_cast<Compute<T>*>(dbias));
  });
}

}  // namespace smp::kernels::cpu::SMP_ISA
