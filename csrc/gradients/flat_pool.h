#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace smp::gradients {

/// Memory of gradients that are on their way: a bucket takes memory with its
/// first gradient and gives it back when its sum has left. Free memory is used
/// again until `trim`. Not thread-safe.
class FlatPool {
 public:
  /// Announces that a bucket will take as many elements.
  void expect(int64_t numel, at::ScalarType dtype);

  /// Returns a tensor of one dim with at least `numel` elements of any content.
  at::Tensor take(int64_t numel, const at::TensorOptions& options);
  void give_back(at::Tensor tensor);
  /// Frees the memory that is not in use.
  void trim();

  int64_t held_bytes() const { return held_bytes_; }  ///< in use or free
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  int64_t common_size(int64_t numel, at::ScalarType dtype) const;

  std::vector<std::pair<at::ScalarType, int64_t>> expected_;
  std::vector<at::Tensor> free_;
  int64_t held_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace smp::gradients
