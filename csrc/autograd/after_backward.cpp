#include "csrc/autograd/after_backward.h"

#include <torch/csrc/autograd/engine.h>

#include <utility>

namespace smp::autograd {

void call_after_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      std::move(callback));
}

}  // namespace smp::autograd
