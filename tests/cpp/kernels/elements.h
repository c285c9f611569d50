#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "tests/cpp/kernels/element.h"

namespace smp::kernels {

template <typename T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr Dtype value = Dtype::kFloat;
  static constexpr double epsilon = 0x1p-23;
};
template <>
struct DtypeOf<double> {
  static constexpr Dtype value = Dtype::kDouble;
  static constexpr double epsilon = 0x1p-52;
};
template <>
struct DtypeOf<cpu::Half> {
  static constexpr Dtype value = Dtype::kHalf;
  static constexpr double epsilon = 0x1p-10;
};
template <>
struct DtypeOf<cpu::BFloat16> {
  static constexpr Dtype value = Dtype::kBFloat16;
  static constexpr double epsilon = 0x1p-7;
};

/// Elements with guards on both sides. Aligned to 16 bytes, unless the first
/// lies `offset` elements further.
template <typename T>
class Elements {
 public:
  using Element = cpu::Element<T>;
  using Compute = typename Element::Compute;

  static constexpr int64_t kGuards = 32;
  static constexpr double kGuardValue = -77;

  explicit Elements(int64_t size, int seed = 0, double spread = 0,
                    int64_t offset = 0)
      : first_(kGuards + offset),
        size_(size),
        elements_(size + offset + 2 * kGuards, stored(kGuardValue)) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, spread > 0 ? spread : 1);
    for (int64_t i = 0; i < size; ++i) {
      elements_[first_ + i] = stored(spread > 0 ? normal(random) : 0);
    }
  }

  int64_t size() const { return size_; }
  T* data() { return elements_.data() + first_; }
  long double operator[](int64_t i) const {
    return Element::load(elements_[first_ + i]);
  }
  void set(int64_t i, double value) { elements_[first_ + i] = stored(value); }

  void clear() {
    for (int64_t i = 0; i < size_; ++i) set(i, 0);
  }
  bool has_bits_of(const Elements& other) const {
    return size_ == other.size_ &&
           std::memcmp(elements_.data() + first_,
                       other.elements_.data() + other.first_,
                       static_cast<size_t>(size_) * sizeof(T)) == 0;
  }

  void expect_guards() const {
    for (int64_t i = 0; i < first_; ++i) {
      ASSERT_EQ(Element::load(elements_[i]), kGuardValue);
    }
    for (int64_t i = 0; i < kGuards; ++i) {
      ASSERT_EQ(Element::load(elements_[first_ + size_ + i]), kGuardValue);
    }
  }

 private:
  static T stored(double value) {
    return Element::store(static_cast<Compute>(value));
  }

  int64_t first_;
  int64_t size_;
  std::vector<T> elements_;
};

}  // namespace smp::kernels
