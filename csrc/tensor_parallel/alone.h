#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp::tensor_parallel {

/// Returns whether a tensor has a shape and no numbers: on the meta device, or
/// fake.
bool has_no_data(const at::Tensor& x);

/// Returns the same numbers as an ordinary tensor, where `x` is a class of
/// Python that only represents them (a handle of a tensor on another rank).
at::Tensor with_data(const at::Tensor& x);
std::vector<at::Tensor> with_data(const std::vector<at::Tensor>& tensors);

/// Sets whether this thread communicates with no other rank; see `Group`.
/// @return the value before
bool set_alone(bool is_alone);
bool alone();

/// Restores in a backward whether its forward ran alone.
class AloneScope {
 public:
  explicit AloneScope(bool is_alone) : before_(set_alone(is_alone)) {}
  ~AloneScope() { set_alone(before_); }
  AloneScope(const AloneScope&) = delete;
  AloneScope& operator=(const AloneScope&) = delete;

 private:
  const bool before_;
};

}  // namespace smp::tensor_parallel
