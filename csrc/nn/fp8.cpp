#include "csrc/nn/fp8.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "csrc/common/check.h"

namespace smp::nn {
namespace {

constexpr auto kValues = c10::ScalarType::Float8_e4m3fn;
constexpr auto kGradients = c10::ScalarType::Float8_e5m2;

// A matrix to be coded.
struct Operand {
  at::Tensor numbers;
  int64_t summed_dim;  // dimension that the product sums over
  c10::ScalarType type;
  bool is_part;  // other ranks have other numbers that share factors with these
};

// Returns the largest absolute values that decide factors, in float32.
at::Tensor largest(const Operand& operand, Fp8Scaling scaling) {
  const at::Tensor& numbers = operand.numbers;
  const bool by_row = scaling == Fp8Scaling::kRowwise;
  if (numbers.numel() == 0) {
    std::vector<int64_t> shape;
    if (by_row) {
      shape = numbers.sizes().vec();
      shape[operand.summed_dim] = 1;
    }
    return at::zeros(shape, numbers.options().dtype(at::kFloat));
  }
  const at::Tensor sizes = numbers.abs();
  return (by_row ? sizes.amax(operand.summed_dim, /*keepdim=*/true)
                 : sizes.amax())
      .to(at::kFloat);
}

// Replaces the maxima of parts by those of all ranks, in one exchange.
void take_maxima(const std::vector<Operand>& operands,
                 std::vector<at::Tensor>& maxima, const MaxOverRanks& over) {
  std::vector<at::Tensor> flat;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].is_part) flat.push_back(maxima[i].flatten());
  }
  if (flat.empty()) return;
  const at::Tensor all = over(at::cat(flat));
  int64_t begin = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!operands[i].is_part) continue;
    const int64_t size = maxima[i].numel();
    maxima[i] = all.narrow(0, begin, size).view(maxima[i].sizes());
    begin += size;
  }
}

// Returns 2^(exponent - 127) for biased exponents, with the bits of a float32.
at::Tensor power_of_two(const at::Tensor& exponent) {
  return exponent.bitwise_left_shift(23).view(at::kFloat);
}

// Codes a matrix with the largest power of two by which its largest numbers
// stay finite. Both formats end at 1.75 * 2^n. Infinities and NaN stay what
// they are, or become NaN in e4m3.
Fp8Matrix coded(const Operand& operand, const at::Tensor& maximum) {
  constexpr int64_t kBias = 127, kBeyond = 0x1fffff;  // up from 1.75
  const int64_t most = operand.type == kValues ? 8 : 15;
  const at::Tensor exponent = maximum.view(at::kInt)
                                  .add(kBeyond)
                                  .bitwise_right_shift(23)
                                  .neg()
                                  .add(most + 2 * kBias)
                                  .clamp(1, 2 * kBias - 1);
  const at::Tensor scale = power_of_two(exponent);
  const auto wide =
      operand.numbers.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {(operand.numbers.to(wide) * scale).to(operand.type),
          power_of_two(exponent.neg().add(2 * kBias))};
}

std::vector<Fp8Matrix> coded(const Fp8Recipe& recipe,
                             const std::vector<Operand>& operands) {
  std::vector<at::Tensor> maxima;
  for (const Operand& operand : operands) {
    maxima.push_back(largest(operand, recipe.scaling));
  }
  take_maxima(operands, maxima, recipe.max_over_ranks);
  std::vector<Fp8Matrix> result;
  for (size_t i = 0; i < operands.size(); ++i) {
    result.push_back(coded(operands[i], maxima[i]));
  }
  return result;
}

bool shares_weight_factors(const Fp8Recipe& recipe, SplitFeatures summed) {
  return recipe.scaling == Fp8Scaling::kTensorwise
             ? recipe.split != SplitFeatures::kNone
             : recipe.split == summed;
}

Fp8Matrix transposed(const Fp8Matrix& matrix) {
  return {matrix.codes.t(),
          matrix.factor.dim() == 2 ? matrix.factor.t() : matrix.factor};
}

// Releases before 2.7 have no kernel for the CPU.
bool has_cpu_kernel() {
  static const bool has = c10::Dispatcher::singleton()
                              .findSchemaOrThrow("aten::_scaled_mm", "")
                              .hasKernelForDispatchKey(c10::DispatchKey::CPU);
  return has;
}

// Kernels of devices want rows of the first operand and columns of the second
// one in memory. Inductor wants them on the CPU, too.
at::Tensor in_rows(const at::Tensor& codes) { return codes.contiguous(); }
at::Tensor in_columns(const at::Tensor& codes) {
  return codes.t().contiguous().t();
}

// Returns the product on the CPU, whose kernel knows factors of whole operands
// only. Factors are powers of two, so multiplying the sums by them is the same.
// float64 is for comparisons of layouts, and has the codes of float32.
at::Tensor cpu_product(const Fp8Matrix& a, const Fp8Matrix& b,
                       const at::Tensor& bias, c10::ScalarType dtype) {
  at::Tensor sums;
  if (dtype == at::kDouble || !has_cpu_kernel()) {
    const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    sums = at::mm(a.codes.to(wide), b.codes.to(wide));
  } else {
    const at::Tensor one = at::ones({}, a.factor.options());
    sums = at::_scaled_mm(in_rows(a.codes), in_columns(b.codes), one, one, {},
                          {}, at::kFloat);
  }
  sums = sums.mul(a.factor.mul(b.factor));
  if (bias.defined()) sums = sums.add(bias);
  return sums.to(dtype);
}

// Appends zeros to a dimension, up to a multiple of 16.
at::Tensor padded(const at::Tensor& codes, int64_t dim) {
  std::vector<int64_t> shape = codes.sizes().vec();
  shape[dim] = (shape[dim] + 15) / 16 * 16;
  if (shape[dim] == codes.size(dim)) return codes;
  const at::Tensor result = at::zeros(shape, codes.options());
  result.narrow(dim, 0, codes.size(dim)).copy_(codes);
  return result;
}

// Returns the product on a device, whose kernels add up 16 numbers or a
// multiple.
at::Tensor device_product(const Fp8Matrix& a, const Fp8Matrix& b,
                          const at::Tensor& bias, c10::ScalarType dtype,
                          bool fast) {
  SMP_CHECK_VALUE(dtype != at::kDouble, "fp8: a layer computes in float64 on ",
                  a.codes.device(),
                  "; expected bfloat16, float16 or float32: train with bf16 or "
                  "fp16, or name the layer in fp8_skip");
  const bool adds = bias.defined() && dtype != at::kFloat;
  at::Tensor result = at::_scaled_mm(
      in_rows(padded(a.codes, 1)), in_columns(padded(b.codes, 0)),
      a.factor.contiguous(), b.factor.contiguous(),
      adds ? std::optional<at::Tensor>(bias.to(dtype)) : std::nullopt, {},
      dtype, fast);
  return bias.defined() && !adds ? result.add(bias) : result;
}

// @param fast  sums of the device may have fewer than 32 bits
at::Tensor product(const Fp8Matrix& a, const Fp8Matrix& b,
                   const at::Tensor& bias, c10::ScalarType dtype, bool fast) {
  if (a.codes.numel() == 0) {
    at::Tensor result = at::zeros({a.codes.size(0), b.codes.size(1)},
                                  a.factor.options().dtype(dtype));
    return bias.defined() ? result.add_(bias) : result;
  }
  return a.codes.is_cpu() ? cpu_product(a, b, bias, dtype)
                          : device_product(a, b, bias, dtype, fast);
}

}  // namespace

Fp8Scaling fp8_scaling(const std::string& name) {
  SMP_CHECK_VALUE(name == "rowwise" || name == "tensorwise",
                  "fp8: expected \"rowwise\" or \"tensorwise\", got \"", name,
                  '"');
  return name == "rowwise" ? Fp8Scaling::kRowwise : Fp8Scaling::kTensorwise;
}

Fp8Forward fp8_forward(const Fp8Recipe& recipe, const at::Tensor& x,
                       at::TensorList weights, at::TensorList biases) {
  const bool has_part_of_x = recipe.split == SplitFeatures::kIn;
  const bool shares = shares_weight_factors(recipe, SplitFeatures::kIn);
  std::vector<Operand> operands{{x, 1, kValues, has_part_of_x}};
  for (const at::Tensor& weight : weights) {
    operands.push_back({weight, 1, kValues, shares});
  }
  const std::vector<Fp8Matrix> codes = coded(recipe, operands);
  Fp8Forward result{{}, codes[0]};
  for (size_t i = 0; i < weights.size(); ++i) {
    result.outputs.push_back(product(codes[0], transposed(codes[1 + i]),
                                     biases[i], x.scalar_type(),
                                     /*fast=*/true));
  }
  return result;
}

Fp8Backward::Fp8Backward(const Fp8Recipe& recipe, std::vector<at::Tensor> grads,
                         at::TensorList weights)
    : recipe_(recipe), grads_(std::move(grads)) {
  const bool codes_weights = !weights.empty();
  if (!codes_weights && recipe_.scaling == Fp8Scaling::kRowwise) return;
  const bool has_part_of_grad = recipe_.split == SplitFeatures::kOut;
  const bool shares = shares_weight_factors(recipe_, SplitFeatures::kOut);
  std::vector<Operand> operands;
  for (size_t i = 0; i < grads_.size(); ++i) {
    if (!grads_[i].defined()) continue;
    operands.push_back({grads_[i], 1, kGradients, has_part_of_grad});
    if (codes_weights) operands.push_back({weights[i], 0, kValues, shares});
  }
  const std::vector<Fp8Matrix> codes = coded(recipe_, operands);
  coded_grads_.resize(grads_.size());
  coded_weights_.resize(codes_weights ? grads_.size() : 0);
  size_t next = 0;
  for (size_t i = 0; i < grads_.size(); ++i) {
    if (!grads_[i].defined()) continue;
    coded_grads_[i] = codes[next++];
    if (codes_weights) coded_weights_[i] = codes[next++];
  }
}

at::Tensor Fp8Backward::input_grad() const {
  at::Tensor sum;
  for (size_t i = 0; i < coded_weights_.size(); ++i) {
    if (!grads_[i].defined()) continue;
    const at::Tensor term = product(coded_grads_[i], coded_weights_[i], {},
                                    grads_[i].scalar_type(), /*fast=*/false);
    sum = sum.defined() ? sum.add_(term) : term;
  }
  return sum;
}

at::Tensor Fp8Backward::weight_grad(size_t i, const at::Tensor& x) {
  if (recipe_.scaling == Fp8Scaling::kRowwise) return at::mm(grads_[i].t(), x);
  if (!coded_x_) {
    const bool is_part = recipe_.split == SplitFeatures::kIn;
    coded_x_ = coded(recipe_, {{x, 1, kValues, is_part}})[0];
  }
  return weight_grad(i, *coded_x_);
}

at::Tensor Fp8Backward::weight_grad(size_t i, const Fp8Matrix& x) const {
  return product(transposed(coded_grads_[i]), x, {}, grads_[i].scalar_type(),
                 /*fast=*/false);
}

}  // namespace smp::nn
