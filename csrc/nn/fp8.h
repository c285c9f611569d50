#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// Products of linear layers whose operands have 8 bits. Values and weights are
// coded in e4m3, gradients in e5m2. docs/design/fp8.md has the reasons.

namespace smp::nn {

/// The numbers that share a factor.
enum class Fp8Scaling {
  kRowwise,     ///< the numbers that are summed up for one element of a product
  kTensorwise,  ///< a whole operand
};

/// The features of a layer of which a rank has a part.
enum class SplitFeatures { kNone, kIn, kOut };

/// Returns the maximum over all ranks of a flat float32 tensor.
using MaxOverRanks = std::function<at::Tensor(const at::Tensor&)>;

/// Returns the scaling of this name.
/// @throws ValueError for other names than "rowwise" and "tensorwise"
Fp8Scaling fp8_scaling(const std::string& name);

/// Tells how the products of a layer are computed.
struct Fp8Recipe {
  Fp8Scaling scaling = Fp8Scaling::kRowwise;
  SplitFeatures split = SplitFeatures::kNone;
  MaxOverRanks max_over_ranks;  // called if `split` is not kNone
};

/// A coded matrix. Its numbers are `codes * factor`.
struct Fp8Matrix {
  at::Tensor codes;
  at::Tensor factor;  // float32, a power of two: [], [rows, 1] or [1, columns]
};

/// The results of a forward pass.
struct Fp8Forward {
  std::vector<at::Tensor> outputs;
  Fp8Matrix x;
};

/// Returns the products of one input with several weights.
/// @param x        [tokens, in]
/// @param weights  [out, in] each
/// @param biases   [out] each; undefined: none
Fp8Forward fp8_forward(const Fp8Recipe& recipe, const at::Tensor& x,
                       at::TensorList weights, at::TensorList biases);

/// The backward pass of `fp8_forward`.
class Fp8Backward {
 public:
  /// Codes what both products need; all maxima of ranks are exchanged here.
  /// @param grads    [tokens, out] each; undefined: no gradient
  /// @param weights  [out, in] each; empty if the input needs no gradient
  Fp8Backward(const Fp8Recipe& recipe, std::vector<at::Tensor> grads,
              at::TensorList weights);

  /// Returns the gradient of the input, [tokens, in].
  at::Tensor input_grad() const;

  /// Returns the gradient of weight `i`, [out, in]. Tensorwise it is a product
  /// of 8 bits. Rowwise it has the operands' own dtype: factors of tokens would
  /// depend on how a batch is cut.
  /// @param x  [tokens, in], as in forward, or its codes
  at::Tensor weight_grad(size_t i, const at::Tensor& x);
  at::Tensor weight_grad(size_t i, const Fp8Matrix& x) const;

 private:
  const Fp8Recipe recipe_;
  const std::vector<at::Tensor> grads_;
  std::vector<Fp8Matrix> coded_grads_;
  std::vector<Fp8Matrix> coded_weights_;
  std::optional<Fp8Matrix> coded_x_;
};

}  // namespace smp::nn
