#pragma once

#include <cstdint>

// Random numbers without a generator: the number of an element is a hash of a
// seed, its row and its column. Backward computes the mask of a dropout again
// instead of keeping it, and CPU and CUDA draw the same. Also read by the CUDA
// compiler.
//
// The costly part depends on the column only, so a CPU computes it once for
// many rows (see cpu/vector/dropout.h); an element of a row then takes one
// product of 32 bits. Rows have random factors and offsets: the elements of two
// columns are as independent as those of multiply-shift hashing (Dietzfelbinger
// 1996), and columns that would go together in every row do not exist, because
// their own hashes are 32 random bits that differ.

#ifdef __CUDACC__
#define SMP_HOST_DEVICE __host__ __device__
#else
#define SMP_HOST_DEVICE
#endif
// Shared by files for several instruction sets: see cpu/vector/isa.h.
#define SMP_INLINED inline __attribute__((always_inline))

namespace smp::kernels {

struct ColumnKey {
  uint32_t first = 0;
  uint32_t second = 0;
};

/// The numbers with which a row turns the hash of a column into that of its
/// element.
struct RowKey {
  uint32_t offset;
  uint32_t factor;  // odd
};

/// The output function of SplitMix64 (Steele, Lea, Flood 2014).
SMP_HOST_DEVICE SMP_INLINED uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

SMP_HOST_DEVICE SMP_INLINED ColumnKey column_key(uint64_t seed) {
  const uint64_t key = mix64(~seed);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

SMP_HOST_DEVICE SMP_INLINED RowKey row_key(uint64_t seed, uint64_t row) {
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15ull;
  const uint64_t key =
      mix64(mix64(seed + kStep) + (row + 1) * 0xd1342543de82ef95ull);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32) | 1u};
}

/// A bijection of 32-bit words for each key; also takes vectors of them. The
/// multipliers are those of Wellons' hash-prospector with two products.
template <typename Word>
SMP_HOST_DEVICE SMP_INLINED Word column_hash(Word column, ColumnKey key) {
  Word x = column ^ key.first;
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x += key.second;
  x ^= x >> 15;
  x *= 0xd35a2d97u;
  x ^= x >> 15;
  return x;
}

/// Returns the number of an element, to be compared as a whole: its high bits
/// are better than its low ones. Also a bijection.
template <typename Word>
SMP_HOST_DEVICE SMP_INLINED Word element_hash(Word column_hash, RowKey key) {
  return (column_hash ^ key.offset) * key.factor;
}

/// Dropout with probability p: an element stays if its hash is at least
/// `threshold`, and is multiplied by `scale`.
struct Dropout {
  uint64_t seed = 0;
  ColumnKey column_key;
  uint32_t threshold = 0;  // 0: everything stays
  double scale = 1;
};

inline Dropout make_dropout(double p, uint64_t seed) {
  const double threshold = p * 4294967296.0;
  return {seed, column_key(seed),
          threshold >= 4294967295.0 ? 0xffffffffu
                                    : static_cast<uint32_t>(threshold),
          p >= 1 ? 0.0 : 1 / (1 - p)};
}

/// Returns whether an element stays; its column's hash may be known to the
/// caller.
SMP_HOST_DEVICE SMP_INLINED bool stays(const Dropout& dropout, RowKey key,
                                       uint32_t column_hash) {
  return element_hash<uint32_t>(column_hash, key) >= dropout.threshold;
}

}  // namespace smp::kernels
