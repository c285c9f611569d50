#pragma once

#include <bit>
#include <cstdint>

namespace smp::kernels::cpu {

/// IEEE half precision, as bits. Branches are selects, so that loops vectorise.
struct Half {
  uint16_t bits;
};

/// The upper half of a float, as bits.
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(Half h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(h.bits & 0x7fffu) << 13;
  // The exponent biases differ by 112; scaling is right for subnormals too.
  const float scaled = std::bit_cast<float>(rest) * 0x1p112f;
  const bool is_special = (h.bits & 0x7c00u) == 0x7c00u;  // inf or nan
  const uint32_t magnitude =
      is_special ? (rest | 0x7f800000u) : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(sign | magnitude);
}

inline float to_float(BFloat16 b) {
  return std::bit_cast<float>(static_cast<uint32_t>(b.bits) << 16);
}

/// Rounds to nearest, ties to even.
inline Half to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Adding 0.5 lets the float unit round subnormals at the right bit.
  const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(aligned) - 0x3f000000u;
  const uint32_t normal =
      (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const bool is_small = magnitude < 0x38800000u;      // below 2^-14
  const bool is_overflow = magnitude >= 0x47800000u;  // 2^16 and above
  const bool is_nan = magnitude > 0x7f800000u;
  const uint32_t finite = is_small ? subnormal : normal;
  const uint32_t result = is_nan ? 0x7e00u : (is_overflow ? 0x7c00u : finite);
  return Half{static_cast<uint16_t>(sign | result)};
}

/// Rounds to nearest, ties to even.
inline BFloat16 to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return BFloat16{static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded)};
}

}  // namespace smp::kernels::cpu
