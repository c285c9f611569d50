#pragma once

#include "csrc/kernels/cpu/float16.h"
#include "csrc/kernels/multi_array.h"

namespace smp::kernels::cpu {

/// The arithmetic of a dtype's elements: load to `Compute`, store from it.
template <typename T>
struct Element {
  using Compute = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

template <>
struct Element<Half> {
  using Compute = float;
  static float load(Half value) { return to_float(value); }
  static Half store(float value) { return to_half(value); }
};

template <>
struct Element<BFloat16> {
  using Compute = float;
  static float load(BFloat16 value) { return to_float(value); }
  static BFloat16 store(float value) { return to_bfloat16(value); }
};

}  // namespace smp::kernels::cpu
