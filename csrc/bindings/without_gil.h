#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <utility>

#include "csrc/common/check.h"

namespace smp::bindings {

/// Wraps a Python function so that C++ threads may call and drop it without the
/// GIL. Its exceptions become errors of ours, which autograd threads can pass
/// on.
template <typename Result, typename... Args>
std::function<Result(Args...)> without_gil(pybind11::function function,
                                           const char* what) {
  namespace py = pybind11;
  const std::shared_ptr<py::function> kept(
      new py::function(std::move(function)), [](py::function* last) {
        const py::gil_scoped_acquire gil;
        delete last;
      });
  return [kept, what](Args... args) -> Result {
    const py::gil_scoped_acquire gil;
    try {
      return (*kept)(args...).template cast<Result>();
    } catch (py::error_already_set& e) {
      throw Error(
          detail::concat(rank_prefix(), "the ", what, " raised ", e.what()));
    }
  };
}

}  // namespace smp::bindings
