#pragma once

#include <cstdint>

#include "csrc/kernels/counter_hash.h"
#include "csrc/kernels/optimizers.h"

// Adam with moments and parameters in fewer bytes than floats have: formats,
// and the numbers that decide how a value is rounded. See
// docs/design/optimizer_bytes.md. Also read by the CUDA compiler; functions on
// bits take one 32-bit word, or a vector of them.

namespace smp::kernels {

/// Storage of moments.
enum class MomentFormat { kFloat, kBFloat16, kInt8 };

/// Neighbouring elements of 8-bit moments that share a scale.
constexpr int64_t kMomentBlock = 256;

/// A parameter whose moments, or whose own digits, are stored in fewer bytes.
struct CompactArrays {
  /// `dtype` is kFloat or kBFloat16, the latter without `copy`; moments are
  /// stored in `format`.
  UpdateArrays arrays;
  MomentFormat format = MomentFormat::kBFloat16;
  float* exp_avg_scales = nullptr;     // kInt8: one number per block
  float* exp_avg_sq_scales = nullptr;  // likewise
  int8_t* residue = nullptr;   // digits of a bfloat16 parameter; null: none
  int64_t first_element = 0;   // number of element 0 in the whole parameter
  uint64_t seed = 0;           // of the parameter
  bool is_stochastic = false;  // else values are rounded to nearest

  /// Returns the elements of the first block that lie in front of the arrays.
  SMP_HOST_DEVICE SMP_INLINED int64_t offset() const {
    return first_element % kMomentBlock;
  }
};

inline int64_t num_moment_blocks(int64_t first_element, int64_t num_elements) {
  const int64_t end = first_element % kMomentBlock + num_elements;
  return (end + kMomentBlock - 1) / kMomentBlock;
}

// ---- Draws: random numbers in [0, 2^32), independent for each element of a
// parameter, each step and each of three roundings. They depend on nothing
// else.

struct DrawKeys {
  ColumnKey column;
  RowKey first_moment;
  RowKey second_moment;
  RowKey parameter;
};

/// @param step  number of the update; as a float, like the counter
SMP_HOST_DEVICE SMP_INLINED DrawKeys draw_keys(uint64_t seed, float step) {
  const uint64_t row = 3 * static_cast<uint64_t>(step);
  return {column_key(seed), row_key(seed, row), row_key(seed, row + 1),
          row_key(seed, row + 2)};
}

/// @param hash  `column_hash` of the number of the element
template <typename Word>
SMP_HOST_DEVICE SMP_INLINED Word draw(Word hash, RowKey key) {
  return element_hash<Word>(hash, key);
}

/// The draw with which values are rounded to nearest, ties away from zero.
constexpr uint32_t kNearest = 0x80000000u;

// ---- Formats. A draw says which share of the digits that are cut off is
// enough to round up; the mean over all draws is the value.

template <typename Word>
SMP_HOST_DEVICE SMP_INLINED Word rounded_bfloat16(Word bits, Word draw) {
  const Word rounded = (bits + (draw >> 16)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? Word{} + 0x7fc0u : rounded;
}

/// Rounds a float to 24 bits: those of a bfloat16, the nearest one, in the high
/// 16 bits of the result, and a signed residue in the 8 bits below.
/// Source: the split of a float into a bfloat16 and further digits,
/// Kalamkar et al. 2020 (arXiv:2005.04680).
template <typename Word>
SMP_HOST_DEVICE SMP_INLINED Word split_bfloat16(Word bits, Word draw) {
  const Word cut = (bits + (draw >> 24)) >> 8;
  const Word rounded =
      (bits & 0x7fffffffu) > 0x7f800000u ? Word{} + 0x7fc000u : cut;
  return (((rounded + 0x80u) >> 8) << 8) | (rounded & 0xffu);
}

/// Returns the float that `split_bfloat16` has split.
template <typename Word>
SMP_HOST_DEVICE SMP_INLINED Word rejoined_bfloat16(Word high, Word low) {
  return ((high << 8) + ((low ^ 0x80u) - 0x80u)) << 8;
}

// 8-bit moments are relative to the largest absolute value of their block, and
// companded: y = |x| / largest * top, code = the leading bits of 1 + y. So
// codes are evenly spaced below 1, and have four binary digits above. Source:
// block-wise codes with more digits for small values, Dettmers et al. 2022
// (arXiv:2110.02861); the companding is that of ITU-T G.711 (mu-law).

constexpr int kCodeShift = 19;  // of 23 binary digits 4 stay
constexpr uint32_t kOneBits = 0x3f800000u;
constexpr uint32_t kFirstTopCode = 127;   // below the sign
constexpr uint32_t kSecondTopCode = 255;  // second moments have no sign
constexpr float kFirstTop = 247;          // (1 + 15/16) 2^7 - 1
constexpr float kSecondTop = 63487;       // (1 + 15/16) 2^15 - 1
constexpr float kOverFirstTop = 1 / kFirstTop;
constexpr float kOverSecondTop = 1 / kSecondTop;
// So the largest value of a block is decoded without an error, and encoding it
// again gives the same scale.
static_assert(kFirstTop * kOverFirstTop == 1, "must be exact");
static_assert(kSecondTop * kOverSecondTop == 1, "must be exact");

/// Returns the code of y, from the bits of 1 + y.
template <typename Word>
SMP_HOST_DEVICE SMP_INLINED Word code_of(Word bits, Word draw, uint32_t top) {
  const Word code =
      (bits - kOneBits + (draw >> (32 - kCodeShift))) >> kCodeShift;
  return code > top ? Word{} + top : code;
}

/// Returns the bits of 1 + y.
template <typename Word>
SMP_HOST_DEVICE SMP_INLINED Word bits_of_code(Word code) {
  return (code << kCodeShift) + kOneBits;
}

namespace cuda {

/// Works like `adam`.
const char* adam_compact(const CompactArrays* arrays, int64_t num_arrays,
                         const AdamOptions& options,
                         const UpdateScalars& scalars, void* stream);

}  // namespace cuda

}  // namespace smp::kernels
