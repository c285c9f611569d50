#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "csrc/kernels/compact_state.h"
#include "tests/cpp/kernels/element.h"

// A parameter with its state in fewer bytes, and the values of both.

namespace smp::kernels {

inline float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

struct Format {
  MomentFormat moments;
  bool is_half;  // the parameter
  bool has_residue;
  Dtype grad;
};

constexpr Format kFormats[] = {
    {MomentFormat::kBFloat16, false, false, Dtype::kFloat},
    {MomentFormat::kBFloat16, false, false, Dtype::kHalf},
    {MomentFormat::kBFloat16, false, false, Dtype::kBFloat16},
    {MomentFormat::kInt8, false, false, Dtype::kFloat},
    {MomentFormat::kInt8, false, false, Dtype::kHalf},
    {MomentFormat::kInt8, false, false, Dtype::kBFloat16},
    {MomentFormat::kFloat, true, false, Dtype::kFloat},
    {MomentFormat::kFloat, true, true, Dtype::kBFloat16},
    {MomentFormat::kBFloat16, true, false, Dtype::kFloat},
    {MomentFormat::kBFloat16, true, true, Dtype::kBFloat16},
    {MomentFormat::kInt8, true, true, Dtype::kFloat},
    {MomentFormat::kInt8, true, false, Dtype::kBFloat16},
};

class CompactData {
 public:
  /// @param begin  number of the first element among the values of a test
  /// @param shift  elements by which the arrays miss an aligned address
  CompactData(const Format& format, int64_t first_element, int64_t size,
              int64_t begin = 0, int64_t shift = 0)
      : m_scales(num_moment_blocks(first_element, size)),
        v_scales(num_moment_blocks(first_element, size)),
        format_(format),
        first_(first_element),
        size_(size),
        shift_(shift),
        wide_(size + shift),
        half_(size + shift),
        copy_(size + shift),
        residue_(size + shift),
        grad_(4 * (size + shift)),
        exp_avg_(4 * (size + shift)),
        exp_avg_sq_(4 * (size + shift)) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (int64_t i = -begin; i < size; ++i) {
      const float p = normal(random), g = normal(random);
      if (i < 0) continue;
      wide_[shift + i] = p;
      half_[shift + i] = cpu::to_bfloat16(p);
      set_gradient(i, std::ldexp(g, static_cast<int>((begin + i) % 13) - 6));
    }
  }

  CompactArrays arrays(bool is_stochastic) {
    CompactArrays c;
    c.arrays.param = format_.is_half
                         ? static_cast<void*>(half_.data() + shift_)
                         : static_cast<void*>(wide_.data() + shift_);
    c.arrays.dtype = format_.is_half ? Dtype::kBFloat16 : Dtype::kFloat;
    c.arrays.grad = place(grad_, grad_bytes(), 0);
    c.arrays.grad_dtype = format_.grad;
    c.arrays.exp_avg = place(exp_avg_, moment_bytes(), 0);
    c.arrays.exp_avg_sq = place(exp_avg_sq_, moment_bytes(), 0);
    c.arrays.copy = format_.is_half ? nullptr : copy_.data() + shift_;
    c.arrays.step = &step;
    c.arrays.num_elements = size_;
    c.format = format_.moments;
    c.exp_avg_scales = m_scales.data();
    c.exp_avg_sq_scales = v_scales.data();
    c.residue = format_.has_residue ? residue_.data() + shift_ : nullptr;
    c.first_element = first_;
    c.seed = 5;
    c.is_stochastic = is_stochastic;
    return c;
  }

  void set_gradient(int64_t i, float value) {
    const uint16_t half = format_.grad == Dtype::kHalf
                              ? cpu::to_half(value).bits
                              : cpu::to_bfloat16(value).bits;
    const bool is_wide = format_.grad == Dtype::kFloat;
    std::memcpy(place(grad_, grad_bytes(), i),
                is_wide ? static_cast<const void*>(&value) : &half,
                static_cast<size_t>(grad_bytes()));
  }

  double gradient(int64_t i) const {
    const auto* p = grad_.data() + grad_bytes() * (shift_ + i);
    float value;
    uint16_t half;
    std::memcpy(&half, p, 2);
    if (format_.grad == Dtype::kHalf) return cpu::to_float(cpu::Half{half});
    if (format_.grad == Dtype::kBFloat16) {
      return cpu::to_float(cpu::BFloat16{half});
    }
    std::memcpy(&value, p, 4);
    return value;
  }

  double param(int64_t i) const {
    if (!format_.is_half) return wide_[shift_ + i];
    const cpu::BFloat16 high = half_[shift_ + i];
    if (!format_.has_residue) return cpu::to_float(high);
    return float_of(rejoined_bfloat16<uint32_t>(
        high.bits, static_cast<uint8_t>(residue_[shift_ + i])));
  }

  /// Returns the distance of parameters of this size.
  double param_unit(double value) const {
    if (!format_.is_half) return 0;
    return std::ldexp(std::abs(value), format_.has_residue ? -15 : -7);
  }

  uint16_t copy(int64_t i) const { return copy_[shift_ + i].bits; }

  /// A moment, and the distance of moments of this size.
  std::tuple<double, double> moment(bool is_second, int64_t i) const {
    const auto& bytes = is_second ? exp_avg_sq_ : exp_avg_;
    const auto* p = bytes.data() + moment_bytes() * (shift_ + i);
    if (format_.moments == MomentFormat::kFloat) {
      float x;
      std::memcpy(&x, p, 4);
      return {x, 0};
    }
    if (format_.moments == MomentFormat::kBFloat16) {
      uint16_t x;
      std::memcpy(&x, p, 2);
      const double value = cpu::to_float(cpu::BFloat16{x});
      return {value, std::ldexp(std::abs(value), -7)};
    }
    const int64_t block = (first_ % kMomentBlock + i) / kMomentBlock;
    const double scale = is_second ? v_scales[block] : m_scales[block];
    const int code = *p & (is_second ? 255 : 127);
    const double unit = std::ldexp(1.0 / 16, code / 16);
    const double y = std::ldexp(1 + code % 16 / 16.0, code / 16) - 1;
    const double sign = !is_second && *p > 127 ? -1 : 1;
    const double top = is_second ? kSecondTop : kFirstTop;
    return {sign * y / top * scale, unit / top * scale};
  }

  float step = 1;
  std::vector<float> m_scales, v_scales;

 private:
  int64_t grad_bytes() const { return format_.grad == Dtype::kFloat ? 4 : 2; }
  int64_t moment_bytes() const {
    return format_.moments == MomentFormat::kFloat      ? 4
           : format_.moments == MomentFormat::kBFloat16 ? 2
                                                        : 1;
  }
  void* place(std::vector<uint8_t>& bytes, int64_t each, int64_t i) const {
    return bytes.data() + each * (shift_ + i);
  }

  Format format_;
  int64_t first_, size_, shift_;
  std::vector<float> wide_;
  std::vector<cpu::BFloat16> half_, copy_;
  std::vector<int8_t> residue_;
  std::vector<uint8_t> grad_, exp_avg_, exp_avg_sq_;
};

}  // namespace smp::kernels
