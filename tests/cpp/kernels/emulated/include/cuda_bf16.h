#pragma once

#include "csrc/kernels/cpu/float16.h"

struct alignas(2) __nv_bfloat16 {
  smp::kernels::cpu::BFloat16 bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
  return smp::kernels::cpu::to_float(value.bits);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return {smp::kernels::cpu::to_bfloat16(value)};
}
