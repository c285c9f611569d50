#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace smp::tensor_parallel {

/// Arguments of a region that are not differentiable, as one thing that an
/// autograd context can keep.
template <typename Call>
class KeptCall final : public torch::CustomClassHolder {
 public:
  explicit KeptCall(Call call) : call_(std::move(call)) {}
  const Call& call() const { return call_; }

 private:
  const Call call_;
};

template <typename Call>
void keep(torch::autograd::AutogradContext* context, const Call& call) {
  context->saved_data["call"] =
      c10::IValue::make_capsule(c10::make_intrusive<KeptCall<Call>>(call));
}

template <typename Call>
const Call& kept(torch::autograd::AutogradContext* context) {
  const auto capsule = context->saved_data.at("call").toCapsule();
  return static_cast<const KeptCall<Call>*>(capsule.get())->call();
}

}  // namespace smp::tensor_parallel
