// The Python extension smp_late_device; tests/device/ makes a device of it.

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <string>

#include "tests/cpp/device/fallback.h"
#include "tests/cpp/device/generator.h"
#include "tests/cpp/device/memory.h"
#include "tests/cpp/device/process_group.h"
#include "tests/cpp/device/streams.h"

namespace py = pybind11;

namespace smp::late {
namespace {

// Some operators have a CPU kernel and a composition of other operators for all
// other devices, such as native_layer_norm. The CPU's is taken here as well:
// its numbers are then the CPU's, bit by bit.
int prefer_cpu_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten",
                                c10::DispatchKey::PrivateUse1, __FILE__,
                                __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int number = 0;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    using c10::DispatchKey;
    if (!op->hasKernelForDispatchKey(DispatchKey::CPU) ||
        !op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) {
      continue;
    }
    const std::string full = name.overload_name.empty()
                                 ? name.name
                                 : name.name + "." + name.overload_name;
    library.impl(full.substr(6).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&fallback>());
    ++number;
  }
  return number;
}

c10::Stream stream_of(int64_t id, c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}

// A Python function for another thread, which frees it with the GIL.
std::function<void()> without_gil(py::function function) {
  const std::shared_ptr<py::function> kept(
      new py::function(std::move(function)), [](py::function* last) {
        const py::gil_scoped_acquire gil;
        delete last;
      });
  return [kept] {
    const py::gil_scoped_acquire gil;
    try {
      (*kept)();
    } catch (py::error_already_set& error) {
      const std::string text = error.what();
      error.restore();
      PyErr_Clear();
      throw std::runtime_error(text);
    }
  };
}

void bind_streams(py::module_& m) {
  m.def("num_devices", &num_devices);
  m.def("current_device", &current_device);
  m.def("set_device",
        [](c10::DeviceIndex index) { return exchange_device(index); });
  m.def("current_stream",
        [](c10::DeviceIndex index) { return current_stream(index).id(); });
  m.def("set_stream", [](int64_t id, c10::DeviceIndex index) {
    return exchange_stream(stream_of(id, index)).id();
  });
  m.def("pool_stream", [](c10::DeviceIndex index, bool is_high) {
    return stream_of_pool(index, is_high).id();
  });
  m.def("synchronize", &drain_device);
  m.def(
      "enqueue",
      [](int64_t id, c10::DeviceIndex index, py::function function) {
        enqueue(stream_of(id, index), without_gil(std::move(function)));
      },
      "Queues a function of the host, as cudaLaunchHostFunc does.");
  m.def("set_delays", &set_delays, py::arg("seed"), py::arg("max_us"));
  m.def("take_error", &take_error);
  m.def("stop", &stop);
}

// Other extensions cannot see the symbols of this one.
py::tuple addresses() {
  return py::make_tuple(reinterpret_cast<uintptr_t>(&enqueue),
                        reinterpret_cast<uintptr_t>(&touchable));
}

void bind_memory(py::module_& m) {
  m.def("memory", [](c10::DeviceIndex index) {
    const MemoryStats stats = memory_stats(index);
    return py::dict(py::arg("allocated") = stats.allocated_bytes,
                    py::arg("peak") = stats.peak_bytes,
                    py::arg("reserved") = stats.reserved_bytes,
                    py::arg("total") = stats.total_bytes);
  });
  m.def("reset_peak", &reset_peak);
  m.def("empty_cache", &empty_cache, py::call_guard<py::gil_scoped_release>());
  m.def("explain_faults", &explain_faults);
}

}  // namespace
}  // namespace smp::late

PYBIND11_MODULE(smp_late_device, m) {
  using namespace smp::late;
  prefer_cpu_kernels();
  bind_streams(m);
  bind_memory(m);
  m.def("process_group", &new_process_group, py::arg("gloo"),
        "Returns a c10d backend for tensors of the device, over one of Gloo.");
  m.def("addresses", &addresses, "Returns those of enqueue and touchable.");
  m.def("counts", &counts);
  m.def("reset_counts", &reset_counts);
  m.def("default_generator",
        [](c10::DeviceIndex index) { return default_generator(index); });
}
