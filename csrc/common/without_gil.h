#pragma once

#include <functional>

namespace smp {

/// Runs `body` with Python's global lock released, when the calling thread
/// holds it. For destructors that join threads: such an object may die while
/// Python collects it, and a thread that drops the last reference to a tensor
/// with a Python object needs that lock before it can end.
void without_gil(const std::function<void()>& body);

/// Sets the function that `without_gil` uses; called once by the bindings.
/// Before that, `body` simply runs.
void set_gil_release(void (*release)(const std::function<void()>& body));

}  // namespace smp
