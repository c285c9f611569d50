#pragma once

#include <cstdint>

// Random numbers without a generator: the number of an element is a hash of a
// seed, its row and its column. Backward computes the mask of a dropout again
// instead of keeping it, and CPU and CUDA draw the same. Also read by the CUDA
// compiler.

#ifdef __CUDACC__
#define SMP_HOST_DEVICE __host__ __device__
#else
#define SMP_HOST_DEVICE
#endif
// Shared by files for several instruction sets: see cpu/vector/isa.h.
#define SMP_INLINED inline __attribute__((always_inline))

namespace smp::kernels {

/// What a row adds to the hash of its elements.
struct RowKey {
  uint32_t first;
  uint32_t second;
};

/// The output function of SplitMix64 (Steele, Lea, Flood 2014).
SMP_HOST_DEVICE SMP_INLINED uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

SMP_HOST_DEVICE SMP_INLINED RowKey row_key(uint64_t seed, uint64_t row) {
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15ull;
  const uint64_t key =
      mix64(mix64(seed + kStep) + (row + 1) * 0xd1342543de82ef95ull);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

/// A bijection of 32-bit words for each key; also takes vectors of them. The
/// multipliers are those of Wellons' triple32.
template <typename Word>
SMP_HOST_DEVICE SMP_INLINED Word element_hash(Word column, Word first,
                                              Word second) {
  Word x = column ^ first;
  x ^= x >> 17;
  x *= 0xed5ad4bbu;
  x ^= x >> 11;
  x *= 0xac4c1b51u;
  x += second;
  x ^= x >> 15;
  x *= 0x31848babu;
  x ^= x >> 14;
  return x;
}

/// Dropout with probability p: an element stays if its hash is at least
/// `threshold`, and is multiplied by `scale`.
struct Dropout {
  uint64_t seed = 0;
  uint32_t threshold = 0;  // 0: everything stays
  double scale = 1;
};

inline Dropout make_dropout(double p, uint64_t seed) {
  const double threshold = p * 4294967296.0;
  return {seed,
          threshold >= 4294967295.0 ? 0xffffffffu
                                    : static_cast<uint32_t>(threshold),
          p >= 1 ? 0.0 : 1 / (1 - p)};
}

}  // namespace smp::kernels
