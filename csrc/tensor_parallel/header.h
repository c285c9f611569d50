#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace smp::tensor_parallel {

/// The values that all ranks must have equal in one collective. Plain bytes, so
/// that it can be sent.
struct Header {
  static constexpr int kMaxDims = 8;

  std::array<char, 40> what{};   ///< the region, cut
  std::array<char, 64> layer{};  ///< the end of the name of the layer
  int64_t dtype = -1;
  int64_t num_dims = -1;  ///< -1: there is no tensor
  std::array<int64_t, kMaxDims> shape{};
  std::array<int64_t, 2> dims{-1, -1};
  int64_t extras = 0;  ///< a hash of everything else

  static Header of(const char* what);
  /// @param shape  shape that all ranks must have
  static Header of(const char* what, const at::Tensor& x, at::IntArrayRef shape,
                   int64_t dim = -1, int64_t other_dim = -1);

  Header& add(const std::vector<int64_t>& sizes);

  uint64_t hash() const;
  /// Returns for instance "gather of Float[4, 12, 64] along dim 1 in
  /// 'h.0.mlp'".
  std::string describe() const;

 private:
  void describe_tensor(std::ostream& out) const;
};

}  // namespace smp::tensor_parallel
