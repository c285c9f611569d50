#pragma once

#include <functional>

namespace smp::autograd {

/// Calls `callback` when the backward that runs on this thread is over. If that
/// backward fails, `callback` is destroyed without having been called.
void call_after_backward(std::function<void()> callback);

}  // namespace smp::autograd
