#include "csrc/tensor_parallel/region_call.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace smp::tensor_parallel {
namespace {

constexpr const char* kKey = "call";

struct Holder final : torch::CustomClassHolder {
  explicit Holder(std::shared_ptr<const void> thing)
      : thing(std::move(thing)) {}
  const std::shared_ptr<const void> thing;
};

}  // namespace

void keep_any(torch::autograd::AutogradContext* context,
              std::shared_ptr<const void> thing) {
  context->saved_data[kKey] =
      c10::IValue::make_capsule(c10::make_intrusive<Holder>(std::move(thing)));
}

const void* kept_any(torch::autograd::AutogradContext* context) {
  const auto capsule = context->saved_data.at(kKey).toCapsule();
  return static_cast<const Holder*>(capsule.get())->thing.get();
}

}  // namespace smp::tensor_parallel
