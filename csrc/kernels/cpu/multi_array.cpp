#include "csrc/kernels/multi_array.h"

#include "csrc/kernels/cpu/element.h"

namespace smp::kernels::cpu {

namespace {

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
