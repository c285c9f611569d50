#pragma once

#include "csrc/kernels/counter_hash.h"
#include "csrc/kernels/cpu/vector/lanes.h"

namespace smp::kernels::cpu::SMP_ISA {

template <typename C>
SMP_INLINE Word<C> first_columns() {
  Word<C> result;
  for (int i = 0; i < kLanes<C>; ++i) result[i] = static_cast<uint32_t>(i);
  return result;
}

/// The hashes of columns [0, n), which all rows share. Whole vectors may be
/// read from any column.
template <typename C>
class ColumnHashes {
 public:
  SMP_INLINE ColumnHashes(const Dropout& dropout, int64_t n)
      : words_(static_cast<uint32_t*>(
            __builtin_malloc((n + 2 * kLanes<C>)*sizeof(uint32_t)))) {
    for (int64_t j = 0; j < n + kLanes<C>; j += kLanes<C>) {
      const Word<C> hash = column_hash<Word<C>>(
          first_columns<C>() + static_cast<uint32_t>(j), dropout.column_key);
      __builtin_memcpy(words_ + j, &hash, sizeof(hash));
    }
  }
  SMP_INLINE ~ColumnHashes() { __builtin_free(words_); }
  ColumnHashes(const ColumnHashes&) = delete;
  ColumnHashes& operator=(const ColumnHashes&) = delete;

  SMP_INLINE Word<C> from(int64_t column) const {
    Word<C> result;
    __builtin_memcpy(&result, words_ + column, sizeof(result));
    return result;
  }

 private:
  uint32_t* words_;
};

/// Returns v * scale where the elements of these columns stay, 0 where they go.
template <typename C>
SMP_INLINE Vec<C> drop(Vec<C> v, const Dropout& dropout, RowKey key,
                       Word<C> column_hashes) {
  const Word<C> hash = element_hash<Word<C>>(column_hashes, key);
  const Int<C> kept =
      __builtin_convertvector(hash >= dropout.threshold, Int<C>);
  return kept ? v * static_cast<C>(dropout.scale) : Vec<C>{};
}

}  // namespace smp::kernels::cpu::SMP_ISA
