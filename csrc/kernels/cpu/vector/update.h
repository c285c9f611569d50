#pragma once

#include "csrc/kernels/cpu/vector/math.h"
#include "csrc/kernels/optimizers.h"

// Updates of parameters. They wait for memory most of the time, so each array
// is read and written once, and the next page is fetched before it is needed.

namespace smp::kernels::cpu::SMP_ISA {

constexpr int64_t kAheadBytes = 1024;

template <typename... Pointers>
SMP_INLINE void fetch_ahead(Pointers... pointers) {
  (__builtin_prefetch(reinterpret_cast<const char*>(pointers) + kAheadBytes),
   ...);
}

// Fetches memory that is read once and not written: it need not stay in the
// caches.
template <typename T>
SMP_INLINE void fetch_once(const T* p) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + kAheadBytes, 0, 0);
}

// ---- Types: parameter C, gradient G, copy W (void: none), and whether the
// copy goes past the caches.

template <typename C, typename G, typename W, bool kBypass>
struct UpdateTypes {
  using Param = C;
  using Grad = G;
  using Copy = W;
  static constexpr bool kBypasses = kBypass;
};

template <typename C, typename G, typename Function>
SMP_INLINE void with_copy_type(const UpdateArrays& arrays, int64_t begin,
                               Function&& function) {
  if (arrays.copy == nullptr) {
    return function(UpdateTypes<C, G, void, false>{});
  }
  if constexpr (sizeof(C) == 4) {
    const auto address = reinterpret_cast<uintptr_t>(arrays.copy) +
                         static_cast<uintptr_t>(begin) * 2;
    const bool bypasses =
        arrays.bypasses_cache && address % (SMP_VECTOR_BYTES / 2) == 0;
    if (arrays.copy_dtype == Dtype::kHalf) {
      bypasses ? function(UpdateTypes<C, G, Half, true>{})
               : function(UpdateTypes<C, G, Half, false>{});
    } else {
      bypasses ? function(UpdateTypes<C, G, BFloat16, true>{})
               : function(UpdateTypes<C, G, BFloat16, false>{});
    }
  }
}

/// Calls function(UpdateTypes<...>{}).
template <typename Function>
SMP_INLINE void with_update_types(const UpdateArrays& arrays, int64_t begin,
                                  Function&& function) {
  if (arrays.dtype == Dtype::kDouble) {
    return with_copy_type<double, double>(arrays, begin, function);
  }
  switch (arrays.grad_dtype) {
    case Dtype::kHalf:
      return with_copy_type<float, Half>(arrays, begin, function);
    case Dtype::kBFloat16:
      return with_copy_type<float, BFloat16>(arrays, begin, function);
    default:
      return with_copy_type<float, float>(arrays, begin, function);
  }
}

template <typename W, bool kBypass, typename Count>
SMP_INLINE void put_copy(W* p, FloatVec v, Count count) {
#if SMP_VECTOR_BYTES > 16
  if constexpr (kBypass && sizeof(Count) == sizeof(All)) {
    const Bits16 bits = narrow(v, W{});
#if SMP_VECTOR_BYTES == 64
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits_as<__m256i>(bits));
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), bits_as<__m128i>(bits));
#endif
    return;
  }
#endif
  put(p, v, count);
}

// Makes writes past the caches visible before later writes.
template <bool kBypass>
SMP_INLINE void finish_copy() {
#if SMP_VECTOR_BYTES > 16
  if constexpr (kBypass) _mm_sfence();
#endif
}

// Returns the pointers of elements from `begin` on.
template <typename Types>
struct UpdatePointers {
  using C = typename Types::Param;
  UpdatePointers(const UpdateArrays& arrays, int64_t begin)
      : param(static_cast<C*>(arrays.param) + begin),
        grad(static_cast<const typename Types::Grad*>(arrays.grad) + begin),
        exp_avg(static_cast<C*>(arrays.exp_avg) + begin),
        exp_avg_sq(static_cast<C*>(arrays.exp_avg_sq) + begin) {
    if constexpr (kHasCopy) {
      copy = static_cast<typename Types::Copy*>(arrays.copy) + begin;
    }
  }

  template <typename Count>
  SMP_INLINE void put_param(int64_t j, Vec<C> p, Count count) const {
    put(param + j, p, count);
    if constexpr (kHasCopy) {
      put_copy<typename Types::Copy, Types::kBypasses>(copy + j, p, count);
    }
  }

  SMP_INLINE ~UpdatePointers() { finish_copy<Types::kBypasses>(); }

  static constexpr bool kHasCopy = !__is_same(typename Types::Copy, void);
  C* param;
  const typename Types::Grad* grad;
  C* exp_avg;
  C* exp_avg_sq;
  typename Types::Copy* copy = nullptr;
};

// ---- Adam and LAMB

template <typename C>
struct Factors {
  explicit Factors(const AdamFactors& f, double rate)
      : grad_factor(static_cast<C>(f.grad_factor)),
        l2(static_cast<C>(f.l2)),
        beta1(static_cast<C>(f.beta1)),
        grad_part(static_cast<C>(f.grad_part)),
        beta2(static_cast<C>(f.beta2)),
        square_part(static_cast<C>(f.square_part)),
        step_size(static_cast<C>(rate * f.step_size)),
        root_factor(static_cast<C>(f.root_factor)),
        eps(static_cast<C>(f.eps)),
        decay(static_cast<C>(rate * f.decay)) {}

  SMP_INLINE void move(Vec<C> g, Vec<C> p, Vec<C>* m, Vec<C>* v) const {
    g *= grad_factor;
    if (l2 != 0) g += p * l2;
    *m = *m * beta1 + g * grad_part;
    *v = *v * beta2 + g * g * square_part;
  }

  // rate * u
  SMP_INLINE Vec<C> update(Vec<C> p, Vec<C> m, Vec<C> v) const {
    Vec<C> u = m * step_size / (root_of<C>(v) * root_factor + eps);
    if (decay != 0) u += p * decay;
    return u;
  }

  C grad_factor, l2, beta1, grad_part, beta2, square_part;
  C step_size, root_factor, eps, decay;
};

template <typename Types>
void adam_of(const UpdateArrays& arrays, const AdamFactors& factors, double lr,
             int64_t begin, int64_t end) {
  using C = typename Types::Param;
  const Factors<C> f(factors, lr);
  const UpdatePointers<Types> at(arrays, begin);
  sweep<C>(end - begin, [&](int64_t j, auto count) {
    fetch_ahead(at.param + j, at.exp_avg + j, at.exp_avg_sq + j);
    fetch_once(at.grad + j);
    const Vec<C> p = get(at.param + j, count);
    Vec<C> m = get(at.exp_avg + j, count);
    Vec<C> v = get(at.exp_avg_sq + j, count);
    f.move(get(at.grad + j, count), p, &m, &v);
    put(at.exp_avg + j, m, count);
    put(at.exp_avg_sq + j, v, count);
    at.put_param(j, p - f.update(p, m, v), count);
  });
}

inline void adam(const UpdateArrays& arrays, const AdamFactors& factors,
                 double lr, int64_t begin, int64_t end) {
  with_update_types(arrays, begin, [&](auto types) {
    adam_of<decltype(types)>(arrays, factors, lr, begin, end);
  });
}

template <typename Types>
void lamb_moments_of(const UpdateArrays& arrays, const AdamFactors& factors,
                     int64_t begin, int64_t end, double* sums) {
  using C = typename Types::Param;
  const Factors<C> f(factors, 1);
  const UpdatePointers<Types> at(arrays, begin);
  C totals[2];
  sweep_sums<C, 2>(end - begin, totals, [&](int64_t j, auto count, auto& s) {
    fetch_ahead(at.param + j, at.exp_avg + j, at.exp_avg_sq + j);
    fetch_once(at.grad + j);
    const Vec<C> p = get(at.param + j, count);
    Vec<C> m = get(at.exp_avg + j, count);
    Vec<C> v = get(at.exp_avg_sq + j, count);
    f.move(get(at.grad + j, count), p, &m, &v);
    put(at.exp_avg + j, m, count);
    put(at.exp_avg_sq + j, v, count);
    const Vec<C> u = keep<C>(f.update(p, m, v), count, C(0));
    s[0] += p * p;
    s[1] += u * u;
  });
  sums[0] = static_cast<double>(totals[0]);
  sums[1] = static_cast<double>(totals[1]);
}

inline void lamb_moments(const UpdateArrays& arrays, const AdamFactors& factors,
                         int64_t begin, int64_t end, double* sums) {
  UpdateArrays moments = arrays;
  moments.copy = nullptr;
  with_update_types(moments, begin, [&](auto types) {
    using Types = decltype(types);
    if constexpr (!UpdatePointers<Types>::kHasCopy) {
      lamb_moments_of<Types>(moments, factors, begin, end, sums);
    }
  });
}

template <typename Types>
void lamb_apply_of(const UpdateArrays& arrays, const AdamFactors& factors,
                   double rate, int64_t begin, int64_t end) {
  using C = typename Types::Param;
  const Factors<C> f(factors, rate);
  const UpdatePointers<Types> at(arrays, begin);
  sweep<C>(end - begin, [&](int64_t j, auto count) {
    fetch_ahead(at.param + j, at.exp_avg + j, at.exp_avg_sq + j);
    const Vec<C> p = get(at.param + j, count);
    const Vec<C> m = get(at.exp_avg + j, count);
    const Vec<C> v = get(at.exp_avg_sq + j, count);
    at.put_param(j, p - f.update(p, m, v), count);
  });
}

inline void lamb_apply(const UpdateArrays& arrays, const AdamFactors& factors,
                       double rate, int64_t begin, int64_t end) {
  UpdateArrays moments = arrays;
  moments.grad_dtype = arrays.dtype;
  with_update_types(moments, begin, [&](auto types) {
    using Types = decltype(types);
    if constexpr (__is_same(typename Types::Grad, typename Types::Param)) {
      lamb_apply_of<Types>(moments, factors, rate, begin, end);
    }
  });
}

// ---- NovoGrad

template <typename Types>
void momentum_of(const UpdateArrays& arrays, const MomentumFactors& factors,
                 int64_t begin, int64_t end) {
  using C = typename Types::Param;
  const C grad_factor = static_cast<C>(factors.grad_factor);
  const C l2 = static_cast<C>(factors.l2);
  const C beta1 = static_cast<C>(factors.beta1);
  const C grad_part = static_cast<C>(factors.grad_part);
  const C rate = static_cast<C>(factors.rate);
  const C decay = static_cast<C>(factors.decay);
  const UpdatePointers<Types> at(arrays, begin);
  sweep<C>(end - begin, [&](int64_t j, auto count) {
    fetch_ahead(at.param + j, at.exp_avg + j);
    fetch_once(at.grad + j);
    const Vec<C> p = get(at.param + j, count);
    Vec<C> g = get(at.grad + j, count) * grad_factor;
    if (l2 != 0) g += p * l2;
    const Vec<C> m = get(at.exp_avg + j, count) * beta1 + g * grad_part;
    put(at.exp_avg + j, m, count);
    Vec<C> u = m * rate;
    if (decay != 0) u += p * decay;
    at.put_param(j, p - u, count);
  });
}

inline void momentum(const UpdateArrays& arrays, const MomentumFactors& factors,
                     int64_t begin, int64_t end) {
  with_update_types(arrays, begin, [&](auto types) {
    momentum_of<decltype(types)>(arrays, factors, begin, end);
  });
}

}  // namespace smp::kernels::cpu::SMP_ISA
