#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

namespace smp::bindings {

/// A new object whose end joins threads, which may need the GIL to end. The
/// last reference may be dropped by Python or by another object of ours.
template <typename T>
std::shared_ptr<T> end_without_gil(T* object) {
  return {object, [](T* ended) {
            std::optional<pybind11::gil_scoped_release> release;
            if (PyGILState_Check() != 0) release.emplace();
            delete ended;
          }};
}

}  // namespace smp::bindings
