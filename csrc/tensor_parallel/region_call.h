#pragma once

#include <memory>

namespace torch::autograd {
struct AutogradContext;
}

namespace smp::tensor_parallel {

/// Makes an autograd context keep an object that is no tensor.
void keep_any(torch::autograd::AutogradContext* context,
              std::shared_ptr<const void> thing);
const void* kept_any(torch::autograd::AutogradContext* context);

/// Keeps the arguments of a region that are not differentiable, as one object.
template <typename Call>
void keep(torch::autograd::AutogradContext* context, const Call& call) {
  keep_any(context, std::make_shared<const Call>(call));
}

template <typename Call>
const Call& kept(torch::autograd::AutogradContext* context) {
  return *static_cast<const Call*>(kept_any(context));
}

}  // namespace smp::tensor_parallel
