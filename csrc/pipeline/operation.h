#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace smp::pipeline {

/// Arithmetic that is done where the tensors are, because bringing them to the
/// caller costs more: sums and scalings of results of other ranks, as in the
/// residual connections of a block that is split. All tensors have one shape
/// and dtype. It works on data only: autograd has recorded it at the caller.
struct Operation {
  enum class Code : char { kAdd, kSub, kMul, kMulScalar, kDivScalar, kNeg };

  Code code = Code::kAdd;
  double scalar = 1;  ///< factor of the second summand, or the number

  int num_tensors() const;
  at::Tensor run(const std::vector<at::Tensor>& tensors) const;

  std::string encode() const;
  static Operation decode(const std::string& bytes);
  /// @param name  name of the ATen operator: "add", "sub", "mul", "div", "neg"
  static Operation named(const std::string& name, bool with_scalar,
                         double scalar);
};

}  // namespace smp::pipeline
