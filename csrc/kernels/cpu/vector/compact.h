#pragma once

#include "csrc/kernels/compact_state.h"
#include "csrc/kernels/cpu/vector/dropout.h"
#include "csrc/kernels/cpu/vector/update.h"

// Adam on moments and parameters in fewer bytes. A block of moments is expanded
// into floats that stay in the nearest cache, updated as any others, and
// rounded again.

namespace smp::kernels::cpu::SMP_ISA {

/// The floats of a block, and the hashes of its elements.
struct Tile {
  alignas(64) float param[kMomentBlock];
  alignas(64) float exp_avg[kMomentBlock];
  alignas(64) float exp_avg_sq[kMomentBlock];
  alignas(64) uint32_t hashes[kMomentBlock];
};

/// The draws of a block, for one of its roundings.
class TileDraws {
 public:
  SMP_INLINE TileDraws(const Tile& tile, bool is_stochastic, RowKey key)
      : hashes_(tile.hashes), is_stochastic_(is_stochastic), key_(key) {}

  SMP_INLINE FloatWord from(int64_t j) const {
    if (!is_stochastic_) return FloatWord{} + kNearest;
    FloatWord hash;
    __builtin_memcpy(&hash, hashes_ + j, sizeof(hash));
    return draw<FloatWord>(hash, key_);
  }

 private:
  const uint32_t* hashes_;
  bool is_stochastic_;
  RowKey key_;
};

SMP_INLINE void hash_elements(Tile* tile, ColumnKey key, int64_t first) {
  for (int64_t j = 0; j < kMomentBlock; j += kLanes<float>) {
    const FloatWord hash = column_hash<FloatWord>(
        first_columns<float>() + static_cast<uint32_t>(first + j), key);
    __builtin_memcpy(tile->hashes + j, &hash, sizeof(hash));
  }
}

// ---- Bytes, as one word per lane.

typedef uint8_t Bytes __attribute__((vector_size(SMP_VECTOR_BYTES / 4)));

SMP_INLINE FloatWord get_bytes(const uint8_t* p, All) {
  Bytes bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
#if SMP_VECTOR_BYTES == 64
  return bits_as<FloatWord>(_mm512_cvtepu8_epi32(bits_as<__m128i>(bytes)));
#elif SMP_VECTOR_BYTES == 32
  return bits_as<FloatWord>(_mm256_cvtepu8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&bytes))));
#else
  return __builtin_convertvector(bytes, FloatWord);
#endif
}

SMP_INLINE FloatWord get_bytes(const uint8_t* p, First first) {
  uint8_t bytes[kLanes<float>] = {};
  for (int i = 0; i < first.count; ++i) bytes[i] = p[i];
  return get_bytes(bytes, All{});
}

SMP_INLINE void put_bytes(uint8_t* p, FloatWord words, All) {
#if SMP_VECTOR_BYTES == 64
  const __m128i bytes = _mm512_cvtepi32_epi8(bits_as<__m512i>(words));
#else
  const Bytes bytes = __builtin_convertvector(words, Bytes);
#endif
  __builtin_memcpy(p, &bytes, sizeof(bytes));
}

SMP_INLINE void put_bytes(uint8_t* p, FloatWord words, First first) {
  uint8_t bytes[kLanes<float>];
  put_bytes(bytes, words, All{});
  for (int i = 0; i < first.count; ++i) p[i] = bytes[i];
}

// ---- Moments

/// Returns the largest absolute value; NaN if there is one.
SMP_INLINE float largest_of(const float* x, int64_t n) {
  FloatWord largest = {};
  sweep<float>(n, [&](int64_t j, auto count) {
    // Bits are compared: NaN is above all others.
    const FloatWord bits = bits_as<FloatWord>(get(x + j, count)) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  });
  uint32_t result = 0;
  for (int i = 0; i < kLanes<float>; ++i) {
    result = largest[i] > result ? largest[i] : result;
  }
  return bits_as<float>(result);
}

template <bool kIsSecond>
void expand_codes(const uint8_t* codes, float scale, int64_t n, float* out) {
  sweep<float>(n, [&](int64_t j, auto count) {
    const FloatWord code = get_bytes(codes + j, count);
    const FloatWord size = kIsSecond ? code : code & kFirstTopCode;
    const FloatVec y = bits_as<FloatVec>(bits_of_code<FloatWord>(size)) - 1.0f;
    const FloatVec x = y * (kIsSecond ? kOverSecondTop : kOverFirstTop) * scale;
    const FloatWord sign =
        kIsSecond ? FloatWord{} : (code & ~kFirstTopCode) << 24;
    put(out + j, bits_as<FloatVec>(bits_as<FloatWord>(x) | sign), count);
  });
}

/// Returns the scale.
template <bool kIsSecond>
float write_codes(const float* in, int64_t n, const TileDraws& draws,
                  uint8_t* codes) {
  const float scale = largest_of(in, n);
  const float divisor = scale == 0 ? 1 : scale;
  sweep<float>(n, [&](int64_t j, auto count) {
    const FloatWord bits = bits_as<FloatWord>(get(in + j, count));
    const FloatVec x = bits_as<FloatVec>(bits & 0x7fffffffu);
    const FloatVec y = x / divisor * (kIsSecond ? kSecondTop : kFirstTop);
    FloatWord code =
        code_of<FloatWord>(bits_as<FloatWord>(y + 1.0f), draws.from(j),
                           kIsSecond ? kSecondTopCode : kFirstTopCode);
    if (kIsSecond) {
      // The step is divided by its root: code 0 is for 0 only.
      const FloatWord least = bits == 0 ? FloatWord{} : FloatWord{} + 1;
      code = code > least ? code : least;
    } else {
      code |= (bits >> 24) & ~kFirstTopCode;
    }
    put_bytes(codes + j, code, count);
  });
  return scale;
}

template <bool kIsSecond>
SMP_INLINE void expand_moment(MomentFormat format, const void* moment,
                              const float* scales, int64_t begin, int64_t n,
                              int64_t block, float* out) {
  switch (format) {
    case MomentFormat::kFloat:
      __builtin_memcpy(out, static_cast<const float*>(moment) + begin,
                       n * sizeof(float));
      return;
    case MomentFormat::kBFloat16: {
      const BFloat16* in = static_cast<const BFloat16*>(moment) + begin;
      fetch_ahead(in);
      sweep<float>(n, [&](int64_t j, auto count) {
        put(out + j, get(in + j, count), count);
      });
      return;
    }
    case MomentFormat::kInt8: {
      const uint8_t* codes = static_cast<const uint8_t*>(moment) + begin;
      fetch_ahead(codes);
      expand_codes<kIsSecond>(codes, scales[block], n, out);
    }
  }
}

template <bool kIsSecond>
SMP_INLINE void write_moment(MomentFormat format, const float* in,
                             const TileDraws& draws, int64_t begin, int64_t n,
                             int64_t block, void* moment, float* scales) {
  switch (format) {
    case MomentFormat::kFloat:
      __builtin_memcpy(static_cast<float*>(moment) + begin, in,
                       n * sizeof(float));
      return;
    case MomentFormat::kBFloat16: {
      BFloat16* out = static_cast<BFloat16*>(moment) + begin;
      sweep<float>(n, [&](int64_t j, auto count) {
        const FloatWord word = rounded_bfloat16<FloatWord>(
            bits_as<FloatWord>(get(in + j, count)), draws.from(j));
        put(out + j, bits_as<FloatVec>(word << 16), count);
      });
      return;
    }
    case MomentFormat::kInt8:
      scales[block] = write_codes<kIsSecond>(
          in, n, draws, static_cast<uint8_t*>(moment) + begin);
  }
}

// ---- Parameters of 16 bits

inline void expand_param(const BFloat16* param, const uint8_t* residue,
                         int64_t n, float* out) {
  sweep<float>(n, [&](int64_t j, auto count) {
    FloatVec p = get(param + j, count);
    if (residue != nullptr) {
      const FloatWord high = bits_as<FloatWord>(p) >> 16;
      p = bits_as<FloatVec>(
          rejoined_bfloat16<FloatWord>(high, get_bytes(residue + j, count)));
    }
    put(out + j, p, count);
  });
}

inline void write_param(const float* in, const TileDraws& draws, int64_t n,
                        BFloat16* param, uint8_t* residue) {
  sweep<float>(n, [&](int64_t j, auto count) {
    const FloatWord bits = bits_as<FloatWord>(get(in + j, count));
    FloatWord word;
    if (residue != nullptr) {
      const FloatWord split = split_bfloat16<FloatWord>(bits, draws.from(j));
      put_bytes(residue + j, split & 0xffu, count);
      word = (split >> 8) << 16;
    } else {
      word = rounded_bfloat16<FloatWord>(bits, draws.from(j)) << 16;
    }
    put(param + j, bits_as<FloatVec>(word), count);
  });
}

// ---- The update

// Elements [begin, begin + n) of an array, all of them in `block`.
inline void adam_block(const CompactArrays& compact, const DrawKeys& keys,
                       const AdamFactors& factors, double lr, int64_t begin,
                       int64_t n, int64_t block) {
  const UpdateArrays& arrays = compact.arrays;
  Tile tile;
  if (compact.is_stochastic) {
    hash_elements(&tile, keys.column, compact.first_element + begin);
  }
  const auto draws = [&](RowKey key) {
    return TileDraws(tile, compact.is_stochastic, key);
  };
  expand_moment<false>(compact.format, arrays.exp_avg, compact.exp_avg_scales,
                       begin, n, block, tile.exp_avg);
  expand_moment<true>(compact.format, arrays.exp_avg_sq,
                      compact.exp_avg_sq_scales, begin, n, block,
                      tile.exp_avg_sq);
  UpdateArrays part = arrays;
  part.dtype = Dtype::kFloat;
  part.exp_avg = tile.exp_avg;
  part.exp_avg_sq = tile.exp_avg_sq;
  part.grad = static_cast<const uint8_t*>(arrays.grad) +
              begin * (arrays.grad_dtype == Dtype::kFloat ? 4 : 2);
  part.bypasses_cache = false;  // an order of writes would cost more
  if (arrays.copy != nullptr) {
    part.copy = static_cast<BFloat16*>(arrays.copy) + begin;  // any 16 bits
  }
  const bool is_half = arrays.dtype == Dtype::kBFloat16;
  uint8_t* residue = nullptr;
  if (is_half) {
    if (compact.residue != nullptr) {
      residue = reinterpret_cast<uint8_t*>(compact.residue) + begin;
    }
    expand_param(static_cast<const BFloat16*>(arrays.param) + begin, residue, n,
                 tile.param);
    part.param = tile.param;
  } else {
    part.param = static_cast<float*>(arrays.param) + begin;
  }
  adam(part, factors, lr, 0, n);
  write_moment<false>(compact.format, tile.exp_avg, draws(keys.first_moment),
                      begin, n, block, arrays.exp_avg, compact.exp_avg_scales);
  write_moment<true>(compact.format, tile.exp_avg_sq, draws(keys.second_moment),
                     begin, n, block, arrays.exp_avg_sq,
                     compact.exp_avg_sq_scales);
  if (is_half) {
    write_param(tile.param, draws(keys.parameter), n,
                static_cast<BFloat16*>(arrays.param) + begin, residue);
  }
}

inline void adam_compact(const CompactArrays& compact,
                         const AdamFactors& factors, double lr, int64_t begin,
                         int64_t end) {
  const DrawKeys keys = draw_keys(compact.seed, *compact.arrays.step);
  const int64_t offset = compact.offset();
  while (begin < end) {
    const int64_t block = (offset + begin) / kMomentBlock;
    const int64_t next = (block + 1) * kMomentBlock - offset;
    const int64_t stop = next < end ? next : end;
    adam_block(compact, keys, factors, lr, begin, stop - begin, block);
    begin = stop;
  }
}

}  // namespace smp::kernels::cpu::SMP_ISA
