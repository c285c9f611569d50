#pragma once

#include "csrc/kernels/cpu/float16.h"

struct alignas(2) __half {
  smp::kernels::cpu::Half bits;
};

inline float __half2float(__half value) {
  return smp::kernels::cpu::to_float(value.bits);
}
inline __half __float2half_rn(float value) {
  return {smp::kernels::cpu::to_half(value)};
}
