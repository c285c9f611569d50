#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

namespace smp::bindings {

/// Returns a new object whose end joins threads, which may need the GIL to end.
/// Python or another object of ours may drop the last reference.
template <typename T>
std::shared_ptr<T> end_without_gil(T* object) {
  return {object, [](T* ended) {
            std::optional<pybind11::gil_scoped_release> release;
            if (PyGILState_Check() != 0) release.emplace();
            delete ended;
          }};
}

}  // namespace smp::bindings
