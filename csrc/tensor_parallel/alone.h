#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp::tensor_parallel {

/// Has a shape and no numbers: on the meta device, or fake.
bool has_no_data(const at::Tensor& x);

/// The same numbers as an ordinary tensor, where `x` is a class of Python that
/// only stands for them (a handle of a tensor on another rank).
at::Tensor with_data(const at::Tensor& x);
std::vector<at::Tensor> with_data(const std::vector<at::Tensor>& tensors);

/// Makes this thread communicate with nobody; see `Group`.
/// @return the value before
bool set_alone(bool is_alone);
bool alone();

/// For the backward of what was begun alone, or was not.
class SameCompany {
 public:
  explicit SameCompany(bool is_alone) : before_(set_alone(is_alone)) {}
  ~SameCompany() { set_alone(before_); }
  SameCompany(const SameCompany&) = delete;
  SameCompany& operator=(const SameCompany&) = delete;

 private:
  const bool before_;
};

}  // namespace smp::tensor_parallel
