#include <vector>

#include "csrc/kernels/compact_state.h"
#include "csrc/kernels/cuda/adam.cuh"

// A warp has a block of moments, eight neighbouring elements per thread. So the
// largest value of a block is known after five exchanges, and no memory is
// shared.

namespace smp::kernels::cuda {

namespace {

constexpr int kEach = kMomentBlock / kWarp;  // elements of a thread
constexpr int kHalfEach = kEach / 2;  // at a time, so that registers suffice
constexpr int kWarps = kNumThreads / kWarp;

struct CompactItem {
  UpdateItem update;
  float* exp_avg_scales;
  float* exp_avg_sq_scales;
  int8_t* residue;
  int64_t num_elements;  // from the begin of the first block on
  int64_t first_element;
  uint64_t seed;
  bool is_stochastic;
};

using CompactList = ChunkListOf<CompactItem, has_long_lists() ? 90 : 16>;
static_assert(sizeof(CompactList) <= kMaxListBytes, "must leave room");

__device__ inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

__device__ inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

/// The elements of a thread in the arrays.
struct Place {
  int64_t first;
  int64_t num_elements;  // of the arrays
  bool is_whole;         // all elements are there, and packs are aligned

  __device__ bool has(int k) const {
    return first + k >= 0 && first + k < num_elements;
  }
};

// Loads elements [begin, begin + kNum) of a place; 0 where there are none.
template <int kNum, typename T>
__device__ inline Values<float, kNum> load_some(const void* array, Place place,
                                                int begin) {
  const T* p = static_cast<const T*>(array) + place.first + begin;
  if (place.is_whole) return load_values<kNum>(p);
  Values<float, kNum> values;
#pragma unroll
  for (int k = 0; k < kNum; ++k) {
    values.v[k] = place.has(begin + k) ? Element<T>::load(p[k]) : 0;
  }
  return values;
}

template <int kNum, typename T>
__device__ inline void store_some(void* array, Place place, int begin,
                                  const Pack<T, kNum>& pack) {
  T* p = static_cast<T*>(array) + place.first + begin;
  if (place.is_whole) return store_pack<kNum>(p, pack);
#pragma unroll
  for (int k = 0; k < kNum; ++k) {
    if (place.has(begin + k)) p[k] = pack.v[k];
  }
}

template <int kNum, typename T>
__device__ inline void store_some(void* array, Place place, int begin,
                                  const Values<float, kNum>& values) {
  Pack<T, kNum> pack;
#pragma unroll
  for (int k = 0; k < kNum; ++k) pack.v[k] = Element<T>::store(values.v[k]);
  store_some<kNum, T>(array, place, begin, pack);
}

template <int kNum>
__device__ inline Pack<uint8_t, kNum> load_bytes(const void* array, Place place,
                                                 int begin) {
  const auto* p = static_cast<const uint8_t*>(array) + place.first + begin;
  if (place.is_whole) return load_pack<kNum>(p);
  Pack<uint8_t, kNum> pack;
#pragma unroll
  for (int k = 0; k < kNum; ++k) pack.v[k] = place.has(begin + k) ? p[k] : 0;
  return pack;
}

/// Returns the keys of an array's draws, computed by one thread of the block.
/// All threads call this.
__device__ inline const DrawKeys& block_keys(const CompactItem& item) {
  __shared__ DrawKeys keys;
  if (threadIdx.x == 0) keys = draw_keys(item.seed, *item.update.step);
  __syncthreads();
  return keys;
}

/// The draws of a thread's elements.
struct Draws {
  const DrawKeys& keys;
  bool is_stochastic;
  uint32_t first;  // number of the thread's first element

  __device__ uint32_t at(int k, RowKey key) const {
    if (!is_stochastic) return kNearest;
    return draw<uint32_t>(column_hash<uint32_t>(first + k, keys.column), key);
  }
};

// ---- Moments

template <MomentFormat kFormat, bool kIsSecond>
__device__ inline void load_moment(const void* moment, const float* scales,
                                   Place place, int64_t block,
                                   float (&out)[kEach]) {
  if constexpr (kFormat == MomentFormat::kInt8) {
    const auto codes = load_bytes<kEach>(moment, place, 0);
    // The thread that writes the scale reads it, so nothing else orders the
    // two.
    const uint32_t own = threadIdx.x % kWarp == 0 ? bits_of(scales[block]) : 0;
    const float scale = float_of(over_row<kWarp>(own, Larger()));
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32_t code = codes.v[k];
      const uint32_t size = kIsSecond ? code : code & kFirstTopCode;
      const float y = float_of(bits_of_code<uint32_t>(size)) - 1.0f;
      const float x = y * (kIsSecond ? kOverSecondTop : kOverFirstTop) * scale;
      const uint32_t sign = kIsSecond ? 0 : (code & ~kFirstTopCode) << 24;
      out[k] = float_of(bits_of(x) | sign);
    }
  } else {
    using T = std::conditional_t<kFormat == MomentFormat::kFloat, float,
                                 __nv_bfloat16>;
    const auto values = load_some<kEach, T>(moment, place, 0);
#pragma unroll
    for (int k = 0; k < kEach; ++k) out[k] = values.v[k];
  }
}

// Returns the largest absolute value over the block; NaN if there is one.
__device__ inline float largest_of(const float (&x)[kEach]) {
  uint32_t largest = 0;  // as whole numbers: NaN is above all others
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    largest = Larger()(largest, bits_of(x[k]) & 0x7fffffffu);
  }
  return float_of(over_row<kWarp>(largest, Larger()));
}

template <bool kIsSecond>
__device__ inline uint8_t code_of_moment(float value, float divisor,
                                         uint32_t draw) {
  const uint32_t bits = bits_of(value);
  const float y = float_of(bits & 0x7fffffffu) / divisor *
                  (kIsSecond ? kSecondTop : kFirstTop);
  uint32_t code = code_of<uint32_t>(bits_of(y + 1.0f), draw,
                                    kIsSecond ? kSecondTopCode : kFirstTopCode);
  if (kIsSecond) {
    if (code == 0 && bits != 0) code = 1;
  } else {
    code |= (bits >> 24) & ~kFirstTopCode;
  }
  return static_cast<uint8_t>(code);
}

template <MomentFormat kFormat, bool kIsSecond>
__device__ inline void store_moment(void* moment, float* scales, Place place,
                                    int64_t block, const Draws& draws,
                                    RowKey key, const float (&in)[kEach]) {
  if constexpr (kFormat == MomentFormat::kInt8) {
    const float scale = largest_of(in);
    const float divisor = scale == 0 ? 1 : scale;
    Pack<uint8_t, kEach> codes;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      codes.v[k] = code_of_moment<kIsSecond>(in[k], divisor, draws.at(k, key));
    }
    store_some<kEach>(moment, place, 0, codes);
    if (threadIdx.x % kWarp == 0) scales[block] = scale;
  } else if constexpr (kFormat == MomentFormat::kBFloat16) {
    Pack<uint16_t, kEach> pack;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      pack.v[k] = static_cast<uint16_t>(
          rounded_bfloat16<uint32_t>(bits_of(in[k]), draws.at(k, key)));
    }
    store_some<kEach>(moment, place, 0, pack);
  } else {
    Values<float, kEach> values;
#pragma unroll
    for (int k = 0; k < kEach; ++k) values.v[k] = in[k];
    store_some<kEach, float>(moment, place, 0, values);
  }
}

// ---- Parameters, kHalfEach of them from `begin` on

template <typename P>
__device__ inline Values<float, kHalfEach> load_params(const CompactItem& item,
                                                       Place place, int begin) {
  auto p = load_some<kHalfEach, P>(item.update.param, place, begin);
  if constexpr (sizeof(P) == 2) {
    if (item.residue == nullptr) return p;
    const auto low = load_bytes<kHalfEach>(item.residue, place, begin);
#pragma unroll
    for (int k = 0; k < kHalfEach; ++k) {
      p.v[k] = float_of(
          rejoined_bfloat16<uint32_t>(bits_of(p.v[k]) >> 16, low.v[k]));
    }
  }
  return p;
}

template <typename P>
__device__ inline void store_params(const CompactItem& item, Place place,
                                    int begin, const Draws& draws,
                                    const Values<float, kHalfEach>& p) {
  const UpdateItem& update = item.update;
  if constexpr (sizeof(P) == 4) {
    store_some<kHalfEach, float>(update.param, place, begin, p);
    if (update.copy == nullptr) return;
    if (update.has_half_copy) {
      store_some<kHalfEach, __half>(update.copy, place, begin, p);
    } else {
      store_some<kHalfEach, __nv_bfloat16>(update.copy, place, begin, p);
    }
  } else {
    Pack<uint16_t, kHalfEach> high;
    Pack<uint8_t, kHalfEach> low;
#pragma unroll
    for (int k = 0; k < kHalfEach; ++k) {
      const uint32_t draw = draws.at(begin + k, draws.keys.parameter);
      const uint32_t bits = bits_of(p.v[k]);
      const uint32_t split = split_bfloat16<uint32_t>(bits, draw);
      low.v[k] = static_cast<uint8_t>(split);
      high.v[k] = static_cast<uint16_t>(
          item.residue != nullptr ? split >> 8
                                  : rounded_bfloat16<uint32_t>(bits, draw));
    }
    store_some<kHalfEach>(update.param, place, begin, high);
    if (item.residue != nullptr) {
      store_some<kHalfEach>(item.residue, place, begin, low);
    }
  }
}

// ---- The update

template <typename P, typename G, MomentFormat kFormat>
__device__ inline void update_block(const CompactItem& item,
                                    const Factors<float>& f, Place place,
                                    const Draws& draws, int64_t block) {
  const UpdateItem& update = item.update;
  float m[kEach], v[kEach];
  load_moment<kFormat, false>(update.exp_avg, item.exp_avg_scales, place, block,
                              m);
  load_moment<kFormat, true>(update.exp_avg_sq, item.exp_avg_sq_scales, place,
                             block, v);
#pragma unroll
  for (int begin = 0; begin < kEach; begin += kHalfEach) {
    auto p = load_params<P>(item, place, begin);
    const auto g = load_some<kHalfEach, G>(update.grad, place, begin);
#pragma unroll
    for (int k = 0; k < kHalfEach; ++k) {
      f.move(g.v[k], p.v[k], &m[begin + k], &v[begin + k]);
      p.v[k] -= f.update(p.v[k], m[begin + k], v[begin + k]);
    }
    store_params<P>(item, place, begin, draws, p);
  }
  store_moment<kFormat, false>(update.exp_avg, item.exp_avg_scales, place,
                               block, draws, draws.keys.first_moment, m);
  store_moment<kFormat, true>(update.exp_avg_sq, item.exp_avg_sq_scales, place,
                              block, draws, draws.keys.second_moment, v);
}

template <typename P, typename G, MomentFormat kFormat>
__global__ void __launch_bounds__(kNumThreads)
    adam_compact_kernel(SMP_LIST(CompactList) list, AdamOptions options,
                        UpdateScalars scalars) {
  if (is_skipped(scalars)) return;
  const CompactItem& item = list.items[list.array_idxs[blockIdx.x]];
  const Factors<float> f(block_factors(options, item.update, scalars),
                         *scalars.lr);
  const DrawKeys& keys = block_keys(item);
  constexpr int kBlocks = kChunkElements / kMomentBlock;
  const int64_t first = int64_t{list.chunk_idxs[blockIdx.x]} * kBlocks;
  const int64_t end = (item.num_elements + kMomentBlock - 1) / kMomentBlock;
  const int64_t offset = item.first_element % kMomentBlock;
  for (int i = threadIdx.x / kWarp; i < kBlocks && first + i < end;
       i += kWarps) {
    const int64_t block = first + i;
    Place place;
    place.first = block * kMomentBlock - offset +
                  static_cast<int>(threadIdx.x % kWarp) * kEach;
    place.num_elements = item.update.num_elements;
    place.is_whole =
        item.update.is_aligned && place.has(0) && place.has(kEach - 1);
    const Draws draws = {
        keys, item.is_stochastic,
        static_cast<uint32_t>(item.first_element + place.first)};
    update_block<P, G, kFormat>(item, f, place, draws, block);
  }
}

bool are_packs_aligned(const CompactArrays& compact) {
  const UpdateArrays& a = compact.arrays;
  const auto is_aligned = [](const void* p, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % (bytes < 16 ? bytes : 16) == 0;
  };
  const int64_t moment_bytes = compact.format == MomentFormat::kFloat      ? 4
                               : compact.format == MomentFormat::kBFloat16 ? 2
                                                                           : 1;
  // Parameters and gradients are taken in halves.
  const int64_t param_bytes = a.dtype == Dtype::kFloat ? 4 : 2;
  const int64_t grad_bytes = a.grad_dtype == Dtype::kFloat ? 4 : 2;
  return compact.offset() % kEach == 0 &&
         is_aligned(a.param, kHalfEach * param_bytes) &&
         is_aligned(a.grad, kHalfEach * grad_bytes) &&
         is_aligned(a.copy, kHalfEach * 2) &&
         is_aligned(compact.residue, kHalfEach) &&
         is_aligned(a.exp_avg, kEach * moment_bytes) &&
         is_aligned(a.exp_avg_sq, kEach * moment_bytes);
}

CompactItem compact_item_of(const CompactArrays& compact) {
  const int64_t size = compact.arrays.num_elements;
  CompactItem item = {item_of(compact.arrays, 0, 0),
                      compact.exp_avg_scales,
                      compact.exp_avg_sq_scales,
                      compact.residue,
                      size > 0 ? size + compact.offset() : 0,
                      compact.first_element,
                      compact.seed,
                      compact.is_stochastic};
  item.update.is_aligned = are_packs_aligned(compact);
  return item;
}

// Runs the update of all arrays of these types.
template <typename P, typename G, MomentFormat kFormat>
class Update {
 public:
  Update(Dtype dtype, Dtype grad_dtype)
      : dtype_(dtype), grad_dtype_(grad_dtype) {}

  const char* run(const std::vector<CompactArrays>& arrays,
                  const AdamOptions& options, const UpdateScalars& scalars,
                  cudaStream_t stream) const {
    return for_each_chunk_list<CompactList>(
        static_cast<int64_t>(arrays.size()),
        [&](int64_t i, CompactItem& item) {
          item = compact_item_of(arrays[i]);
          return arrays[i].arrays.dtype == dtype_ &&
                 arrays[i].arrays.grad_dtype == grad_dtype_ &&
                 arrays[i].format == kFormat;
        },
        [&](const CompactList& list, int num_blocks) {
          adam_compact_kernel<P, G, kFormat>
              <<<num_blocks, kNumThreads, 0, stream>>>(list, options, scalars);
          return error_text(cudaGetLastError());
        });
  }

 private:
  Dtype dtype_;
  Dtype grad_dtype_;
};

}  // namespace

const char* adam_compact(const CompactArrays* arrays, int64_t num_arrays,
                         const AdamOptions& options,
                         const UpdateScalars& scalars, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const std::vector<CompactArrays> all(arrays, arrays + num_arrays);
  std::vector<UpdateArrays> updates;
  for (const CompactArrays& compact : all) updates.push_back(compact.arrays);
  const char* error =
      count_steps(updates.data(), num_arrays, scalars, cuda_stream);
  const auto run = [&](auto update) {
    if (error == nullptr)
      error = update.run(all, options, scalars, cuda_stream);
  };
  constexpr auto kWide = Dtype::kFloat;
  constexpr auto kHalf = Dtype::kHalf;
  constexpr auto kBFloat16 = Dtype::kBFloat16;
  using Format = MomentFormat;
  run(Update<float, float, Format::kBFloat16>(kWide, kWide));
  run(Update<float, float, Format::kInt8>(kWide, kWide));
  run(Update<float, __half, Format::kBFloat16>(kWide, kHalf));
  run(Update<float, __half, Format::kInt8>(kWide, kHalf));
  run(Update<float, __nv_bfloat16, Format::kBFloat16>(kWide, kBFloat16));
  run(Update<float, __nv_bfloat16, Format::kInt8>(kWide, kBFloat16));
  run(Update<__nv_bfloat16, float, Format::kFloat>(kBFloat16, kWide));
  run(Update<__nv_bfloat16, float, Format::kBFloat16>(kBFloat16, kWide));
  run(Update<__nv_bfloat16, float, Format::kInt8>(kBFloat16, kWide));
  run(Update<__nv_bfloat16, __nv_bfloat16, Format::kFloat>(kBFloat16,
                                                           kBFloat16));
  run(Update<__nv_bfloat16, __nv_bfloat16, Format::kBFloat16>(kBFloat16,
                                                              kBFloat16));
  run(Update<__nv_bfloat16, __nv_bfloat16, Format::kInt8>(kBFloat16,
                                                          kBFloat16));
  return error;
}

}  // namespace smp::kernels::cuda
