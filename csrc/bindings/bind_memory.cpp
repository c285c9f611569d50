#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/common/task_scope.h"
#include "csrc/health/fault_board.h"
#include "csrc/memory/activation_store.h"
#include "csrc/memory/device_meter.h"
#include "csrc/memory/host_allocator.h"
#include "csrc/memory/random_state.h"
#include "csrc/memory/recompute.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

// The class of `with task_scope(step, mb):` for microbatches that run without a
// server.
class PyTaskScope {
 public:
  explicit PyTaskScope(Task task) : task_(task) {}
  void enter() { scope_.emplace(task_); }
  void exit(const py::args&) { scope_.reset(); }

 private:
  Task task_;
  std::optional<TaskScope> scope_;
};

using Tensors = std::vector<at::Tensor>;

// Autograd keeps the function and drops it without the GIL.
memory::RecomputedFunction checkpointed(py::function function) {
  const std::shared_ptr<py::function> kept(
      new py::function(std::move(function)), [](py::function* held) {
        py::gil_scoped_acquire gil;
        delete held;
      });
  return [kept](Tensors inputs) {
    py::gil_scoped_acquire gil;
    py::list arguments(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      arguments[i] = py::cast(std::move(inputs[i]));
    }
    return (*kept)(std::move(arguments)).cast<Tensors>();
  };
}

Tensors recompute(
    py::function function, const Tensors& inputs, bool needs_grad,
    bool preserve_random_state, const std::string& device,
    std::optional<std::shared_ptr<memory::ActivationStore>> store) {
  memory::RecomputeOptions options;
  options.needs_grad = needs_grad;
  options.preserve_random_state = preserve_random_state;
  options.device = c10::Device(device);
  options.store = store.value_or(nullptr);
  auto call = checkpointed(std::move(function));
  py::gil_scoped_release release;
  return memory::recompute(std::move(call), inputs, options);
}

py::dict stats(const memory::ActivationStore& store) {
  const memory::ActivationStore::Stats stats = store.stats();
  py::dict result;
  result["checkpoints"] = stats.num_recomputed;
  result["offloaded"] = stats.num_offloaded;
  result["bytes_offloaded"] = stats.bytes_offloaded;
  result["stayed"] = stats.num_stayed;
  result["loaded_ahead"] = stats.num_loaded_ahead;
  result["loaded_late"] = stats.num_loaded_late;
  result["slots"] = stats.pool.num_slots;
  result["slots_in_use"] = stats.pool.slots_in_use;
  result["peak_slots_in_use"] = stats.pool.peak_slots_in_use;
  result["host_bytes"] = stats.pool.bytes;
  result["host_bytes_in_use"] = stats.pool.bytes_in_use;
  result["peak_host_bytes_in_use"] = stats.pool.peak_bytes_in_use;
  return result;
}

void bind_host_memory(py::module_& m) {
  using memory::HostAllocator;
  const py::call_guard<py::gil_scoped_release> release;
  m.def(
      "use_host_allocator",
      [](bool is_used) {
        HostAllocator& allocator = HostAllocator::instance();
        is_used ? allocator.install() : allocator.uninstall();
      },
      py::arg("is_used"), release,
      "From here on large CPU tensors of this process stay out of the C "
      "library's heap; or all are made as they were before.");
  m.def(
      "release_idle_host_memory",
      [] { HostAllocator::instance().release_idle(); }, release,
      "Memory that was not used since the call before the last one goes back.");
  m.def(
      "release_host_memory", [] { HostAllocator::instance().release_all(); },
      release, "All free memory of the host goes back to the system.");
  m.def(
      "host_memory_stats",
      [] {
        const HostAllocator::Stats stats = HostAllocator::instance().stats();
        py::dict result;
        result["mapped"] = stats.num_mapped;
        result["reused"] = stats.num_reused;
        result["live_bytes"] = stats.live_bytes;
        result["cached_bytes"] = stats.cached_bytes;
        result["failures"] = stats.num_failures;
        result["failed_bytes"] = stats.failed_bytes;
        result["live_at_failure_bytes"] = stats.live_at_failure_bytes;
        return result;
      },
      "Blocks that came from the system and that were used again; bytes in "
      "use and free; of the last time that there was no memory, what was asked "
      "for and was in use.");
}

/// An object whose end waits for other threads, which may wait for the GIL.
template <typename T>
struct EndsWithoutGil {
  std::shared_ptr<T> held;

  explicit EndsWithoutGil(std::shared_ptr<T> value) : held(std::move(value)) {}
  ~EndsWithoutGil() {
    const py::gil_scoped_release release;
    held.reset();
  }
  EndsWithoutGil(const EndsWithoutGil&) = delete;
  EndsWithoutGil& operator=(const EndsWithoutGil&) = delete;
};

void bind_saved_tensors(py::module_& m) {
  using memory::ActivationStore;
  using Saved = EndsWithoutGil<ActivationStore::Saved>;
  using Saving = EndsWithoutGil<ActivationStore::Saving>;
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<Saved>(m, "SavedTensor", "A tensor that autograd has saved.")
      .def(
          "tensor", [](const Saved& saved) { return saved.held->tensor(); },
          release, "Returns the tensor, on the device.");
  py::class_<Saving>(m, "SavingForward",
                     "A forward whose saved tensors go to host memory.")
      .def(py::init([](std::shared_ptr<ActivationStore> store) {
             return std::make_unique<Saving>(
                 std::make_shared<ActivationStore::Saving>(std::move(store)));
           }),
           py::arg("store"))
      .def(
          "save",
          [](const Saving& saving, const at::Tensor& tensor) {
            auto saved = saving.held->save(tensor);
            return saved ? std::make_unique<Saved>(std::move(saved)) : nullptr;
          },
          py::arg("tensor"), release, "Takes a tensor; None: it stays.")
      .def(
          "end", [](const Saving& saving) { saving.held->end(); }, release,
          "Ends the forward.");
}

void bind_recompute(py::module_& m) {
  using memory::ActivationStore;
  py::class_<ActivationStore, std::shared_ptr<ActivationStore>>(
      m, "ActivationStore", "Keeps tensors for a backward in host memory.")
      .def(py::init([](const std::string& device, int horizon,
                       int64_t min_bytes, int64_t group_bytes) {
             return std::make_shared<ActivationStore>(ActivationStore::Options{
                 c10::Device(device), horizon, min_bytes, group_bytes});
           }),
           py::arg("device"), py::arg("horizon"),
           py::arg("min_bytes") = int64_t{1} << 20,
           py::arg("group_bytes") = int64_t{64} << 20)
      .def("set_resident", &ActivationStore::set_resident, py::arg("tensors"),
           py::call_guard<py::gil_scoped_release>(),
           "Sets the tensors whose memory stays in any case.")
      .def("stats", &stats);
  bind_saved_tensors(m);
  m.def("recompute", &recompute, py::arg("function"), py::arg("inputs"),
        py::kw_only(), py::arg("needs_grad"), py::arg("preserve_random_state"),
        py::arg("device"), py::arg("store"),
        "Runs function(tensors) -> tensors without a graph, and again in "
        "backward.");
  m.def(
      "current_step", [] { return current_task().step; },
      "The step that this thread works on; -1 outside of steps.");
  m.def(
      "current_microbatch", [] { return current_task().mb; },
      "The microbatch that this thread works on; -1 outside of steps.");
  m.def("is_recomputing", &memory::is_recomputing,
        "Whether this thread runs a checkpointed function for its backward.");
}

void bind_device_meter(py::module_& m) {
  using memory::DeviceMeter;
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<DeviceMeter, std::shared_ptr<DeviceMeter>>(
      m, "DeviceMeter", "How far a device is with what it was asked for.")
      .def(py::init([](const std::string& device) {
             return std::make_shared<DeviceMeter>(c10::Device(device));
           }),
           py::arg("device"))
      .def(
          "mark", [](DeviceMeter& meter) { meter.mark(); }, release,
          "A task ends here, on the current stream.")
      .def(
          "count_on",
          [](std::shared_ptr<DeviceMeter> meter, health::FaultBoard& board) {
            board.waits().add_source(
                [meter = std::move(meter)] { return meter->read(); });
          },
          release, py::arg("board"),
          "What the device gets done is progress of this process.");
}

}  // namespace

void bind_memory(py::module_& m) {
  bind_device_meter(m);
  bind_recompute(m);
  bind_host_memory(m);
  using memory::RandomState;
  py::class_<RandomState>(m, "RandomState",
                          "A copy of the default random generators.")
      .def_static(
          "capture",
          [](const std::string& device) {
            return RandomState::capture(c10::Device(device));
          },
          py::arg("device"), "Copies the CPU's generator and the device's.")
      .def("restore", &RandomState::restore);
  m.def(
      "seed_generators",
      [](uint64_t seed, const std::string& device) {
        memory::seed_generators(seed, c10::Device(device));
      },
      py::arg("seed"), py::arg("device"),
      "Seeds the default generators of the CPU and of the device.");
  m.def("mix_seed", &memory::mix_seed, py::arg("seed"), py::arg("value"),
        "A seed made of two numbers (splitmix64).");
  py::class_<PyTaskScope>(m, "TaskScope",
                          "Context manager: what the thread works on.")
      .def(py::init([](int64_t step, int mb) {
             return std::make_unique<PyTaskScope>(Task{step, mb});
           }),
           py::arg("step"), py::arg("mb"))
      .def("__enter__", &PyTaskScope::enter)
      .def("__exit__", &PyTaskScope::exit);
}

}  // namespace smp::bindings
