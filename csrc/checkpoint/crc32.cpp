#include "csrc/checkpoint/crc32.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace smp::checkpoint {

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320u;
constexpr int kSlices = 8;

using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// tables[k][b]: the register after byte b and k zero bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc & 1) ? (crc >> 1) ^ kPolynomial : crc >> 1;
    }
    tables[0][b] = crc;
  }
  for (uint32_t b = 0; b < 256; ++b) {
    for (int k = 1; k < kSlices; ++k) {
      const uint32_t below = tables[k - 1][b];
      tables[k][b] = (below >> 8) ^ tables[0][below & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

// The functions below continue the register, which is the inverted CRC.

uint32_t continue_by_table(uint32_t crc, const std::byte* at, size_t count) {
  if constexpr (std::endian::native == std::endian::little) {
    for (; count >= 8; count -= 8, at += 8) {
      uint64_t word;
      std::memcpy(&word, at, 8);
      word ^= crc;
      crc = 0;
      for (int k = 0; k < kSlices; ++k) {
        crc ^= kTables[kSlices - 1 - k][(word >> (8 * k)) & 0xFF];
      }
    }
  }
  for (; count > 0; --count, ++at) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(*at)) & 0xFF];
  }
  return crc;
}

#if defined(__x86_64__)

constexpr size_t kFoldBytes = 64;

#define SMP_PCLMUL __attribute__((target("pclmul,sse4.1")))

SMP_PCLMUL __m128i load(const std::byte* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

SMP_PCLMUL __m128i fold(__m128i value, __m128i keys, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, keys, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, keys, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Reduces 128 bits to the 32 of the register: two folds and a Barrett
// reduction.
SMP_PCLMUL uint32_t reduce(__m128i value, __m128i keys) {
  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
  __m128i rest = _mm_clmulepi64_si128(value, keys, 0x10);
  value = _mm_xor_si128(_mm_srli_si128(value, 8), rest);
  rest = _mm_srli_si128(value, 4);
  value = _mm_and_si128(value, low_words);
  value = _mm_clmulepi64_si128(value, _mm_set_epi64x(0, 0x163cd6124), 0x00);
  value = _mm_xor_si128(value, rest);
  const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
  rest = _mm_and_si128(value, low_words);
  rest = _mm_clmulepi64_si128(rest, barrett, 0x10);
  rest = _mm_and_si128(rest, low_words);
  rest = _mm_clmulepi64_si128(rest, barrett, 0x00);
  return _mm_extract_epi32(_mm_xor_si128(value, rest), 1);
}

// `count` is a multiple of 16 and at least kFoldBytes.
SMP_PCLMUL uint32_t continue_by_folding(uint32_t crc, const std::byte* at,
                                        size_t count) {
  const __m128i far_keys = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
  const __m128i near_keys = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i a = _mm_xor_si128(load(at), _mm_cvtsi32_si128(crc));
  __m128i b = load(at + 16);
  __m128i c = load(at + 32);
  __m128i d = load(at + 48);
  at += kFoldBytes;
  count -= kFoldBytes;
  for (; count >= kFoldBytes; count -= kFoldBytes, at += kFoldBytes) {
    a = fold(a, far_keys, load(at));
    b = fold(b, far_keys, load(at + 16));
    c = fold(c, far_keys, load(at + 32));
    d = fold(d, far_keys, load(at + 48));
  }
  a = fold(a, near_keys, b);
  a = fold(a, near_keys, c);
  a = fold(a, near_keys, d);
  for (; count >= 16; count -= 16, at += 16) a = fold(a, near_keys, load(at));
  return reduce(a, near_keys);
}

bool has_hardware() {
  static const bool has =
      __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return has;
}

uint32_t continue_crc(uint32_t crc, const std::byte* at, size_t count) {
  if (count >= kFoldBytes && has_hardware()) {
    const size_t folded = count / 16 * 16;
    crc = continue_by_folding(crc, at, folded);
    at += folded;
    count -= folded;
  }
  return continue_by_table(crc, at, count);
}

#elif defined(__aarch64__)

__attribute__((target("+crc"))) uint32_t
continue_by_instruction(uint32_t crc, const std::byte* at, size_t count) {
  for (; count >= 8; count -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    crc = __crc32d(crc, word);
  }
  for (; count > 0; --count, ++at) {
    crc = __crc32b(crc, static_cast<uint8_t>(*at));
  }
  return crc;
}

uint32_t continue_crc(uint32_t crc, const std::byte* at, size_t count) {
  static const bool has_hardware = getauxval(AT_HWCAP) & HWCAP_CRC32;
  return has_hardware ? continue_by_instruction(crc, at, count)
                      : continue_by_table(crc, at, count);
}

#else

uint32_t continue_crc(uint32_t crc, const std::byte* at, size_t count) {
  return continue_by_table(crc, at, count);
}

#endif

// Returns a * b modulo the polynomial; the highest bit is the factor of x^0.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// powers[k]: x^(8 * 2^k) modulo the polynomial.
constexpr std::array<uint32_t, 64> make_powers() {
  std::array<uint32_t, 64> powers{};
  uint32_t power = 1u << 23;  // x^8
  for (auto& p : powers) {
    p = power;
    power = multiply(power, power);
  }
  return powers;
}

constexpr std::array<uint32_t, 64> kPowers = make_powers();

}  // namespace

uint32_t crc32(std::span<const std::byte> bytes, uint32_t crc) {
  return ~continue_crc(~crc, bytes.data(), bytes.size());
}

uint32_t crc32_by_table(std::span<const std::byte> bytes, uint32_t crc) {
  return ~continue_by_table(~crc, bytes.data(), bytes.size());
}

uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t second_bytes) {
  uint32_t factor = 1u << 31;  // x^0
  for (int k = 0; second_bytes != 0; ++k, second_bytes >>= 1) {
    if (second_bytes & 1) factor = multiply(kPowers[k], factor);
  }
  return multiply(factor, first) ^ second;
}

}  // namespace smp::checkpoint
