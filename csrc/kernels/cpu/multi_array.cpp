#include "csrc/kernels/multi_array.h"

#include "csrc/kernels/cpu/element.h"

namespace smp::kernels::cpu {

namespace {

// Independent sums: the compiler may not reorder one, but can add these at
// once.
constexpr int kNumLanes = 8;

template <typename T>
double sum_of_squares_of(const T* data, int64_t num_elements) {
  double lanes[kNumLanes] = {};
  int64_t i = 0;
  for (; i + kNumLanes <= num_elements; i += kNumLanes) {
    for (int lane = 0; lane < kNumLanes; ++lane) {
      const double value = Element<T>::load(data[i + lane]);
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  for (; i < num_elements; ++i) {
    const double value = Element<T>::load(data[i]);
    sum += value * value;
  }
  return sum;
}

template <typename T>
void scale_by(T* data, int64_t num_elements, double factor) {
  using Compute = typename Element<T>::Compute;
  const Compute f = static_cast<Compute>(factor);
  for (int64_t i = 0; i < num_elements; ++i) {
    data[i] = Element<T>::store(Element<T>::load(data[i]) * f);
  }
}

template <typename T>
void add_scaled_to(T* __restrict y, const T* __restrict x, int64_t num_elements,
                   double a) {
  using Compute = typename Element<T>::Compute;
  const Compute f = static_cast<Compute>(a);
  for (int64_t i = 0; i < num_elements; ++i) {
    y[i] =
        Element<T>::store(Element<T>::load(y[i]) + f * Element<T>::load(x[i]));
  }
}

}  // namespace

double sum_of_squares(const Array* arrays, int64_t num_arrays) {
  double sum = 0;
  for (int64_t i = 0; i < num_arrays; ++i) {
    const Array& array = arrays[i];
    sum += dispatch(array.dtype, [&array](auto element) {
      using T = decltype(element);
      return sum_of_squares_of(static_cast<const T*>(array.data),
                               array.num_elements);
    });
  }
  return sum;
}

void scale(const Array* arrays, int64_t num_arrays, double factor) {
  for (int64_t i = 0; i < num_arrays; ++i) {
    const Array& array = arrays[i];
    dispatch(array.dtype, [&array, factor](auto element) {
      using T = decltype(element);
      scale_by(static_cast<T*>(array.data), array.num_elements, factor);
    });
  }
}

void add_scaled(const ArrayPair* pairs, int64_t num_pairs, double a) {
  for (int64_t i = 0; i < num_pairs; ++i) {
    const ArrayPair& pair = pairs[i];
    dispatch(pair.dtype, [&pair, a](auto element) {
      using T = decltype(element);
      add_scaled_to(static_cast<T*>(pair.y), static_cast<const T*>(pair.x),
                    pair.num_elements, a);
    });
  }
}

}  // namespace smp::kernels::cpu
