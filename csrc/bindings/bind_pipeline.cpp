#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <utility>

#include "csrc/bindings/bytes.h"
#include "csrc/health/fault_board.h"
#include "csrc/mailbox/mailbox.h"
#include "csrc/memory/device_meter.h"
#include "csrc/pipeline/remote_call.h"
#include "csrc/pipeline/server.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

using mailbox::MessageTensor;
using pipeline::Call;
using pipeline::Server;

// Keeps a Python object that C++ threads may drop without the GIL.
std::shared_ptr<py::object> keep(py::object object) {
  return {new py::object(std::move(object)), [](py::object* kept) {
            py::gil_scoped_acquire gil;
            delete kept;
          }};
}

// Keeps one Python thread state for the life of a context thread, so that
// threading.local values and autocast survive from job to job.
void enter_python_thread(const std::function<void()>& body) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyThreadState* thread = PyEval_SaveThread();
  body();
  PyEval_RestoreThread(thread);
  PyGILState_Release(state);
}

std::shared_ptr<Server> make_server(
    std::shared_ptr<mailbox::Mailbox> mailbox,
    std::shared_ptr<health::FaultBoard> faults, int global_rank,
    std::vector<int> pp_ranks, std::vector<int> order_ranks, std::string policy,
    int num_chunks, int active_microbatches, bool deterministic,
    const std::string& device, double timeout_s,
    std::shared_ptr<pipeline::Timeline> timeline,
    std::shared_ptr<memory::DeviceMeter> device_meter) {
  Server::Options options;
  options.global_rank = global_rank;
  options.pp_ranks = std::move(pp_ranks);
  options.order_ranks = std::move(order_ranks);
  options.policy = std::move(policy);
  options.num_chunks = num_chunks;
  options.active_microbatches = active_microbatches;
  options.deterministic = deterministic;
  options.device = c10::Device(device);
  options.timeout =
      std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3));
  options.timeline = std::move(timeline);
  options.device_meter = std::move(device_meter);
  return {new Server(std::move(options), std::move(mailbox), std::move(faults),
                     enter_python_thread),
          [](Server* server) {
            py::gil_scoped_release release;  // its threads need the GIL to end
            delete server;
          }};
}

void set_forward_handler(Server& server, py::function handler) {
  server.callee().set_forward_handler(
      [kept = keep(std::move(handler))](Call call) {
        py::gil_scoped_acquire gil;
        py::list tensors(call.tensors.size());
        for (size_t i = 0; i < call.tensors.size(); ++i) {
          tensors[i] = py::cast(std::move(call.tensors[i].data));
        }
        const py::tuple result = (*kept)(
            call.module_id, call.mb, (call.flags & pipeline::kTraining) != 0,
            (call.flags & pipeline::kWantsMeta) != 0, py::bytes(call.structure),
            std::move(tensors));
        Call answer;
        answer.structure = result[0].cast<std::string>();
        for (auto& tensor : result[1].cast<std::vector<at::Tensor>>()) {
          answer.tensors.emplace_back();
          answer.tensors.back().data = std::move(tensor);
        }
        answer.has_values = result[2].cast<bool>();
        return answer;
      });
}

void set_handle_factory(Server& server, py::function factory) {
  server.tensors().set_handle_factory(
      [kept = keep(std::move(factory))](
          const std::vector<pipeline::TensorMeta>& metas) {
        py::gil_scoped_acquire gil;
        std::vector<at::Tensor> handles;
        handles.reserve(metas.size());
        for (const pipeline::TensorMeta& meta : metas) {
          const auto dtype = py::reinterpret_borrow<py::object>(
              reinterpret_cast<PyObject*>(torch::getTHPDtype(meta.dtype)));
          handles.push_back((*kept)(py::tuple(py::cast(meta.sizes)), dtype)
                                .cast<at::Tensor>());
        }
        return handles;
      });
}

void run_step(Server& server, int num_microbatches, uint64_t seed,
              py::function body) {
  auto kept = keep(std::move(body));
  py::gil_scoped_release release;
  server.steps().run(num_microbatches, seed, [kept](int mb) {
    py::gil_scoped_acquire gil;
    (*kept)(mb);
  });
}

py::tuple remote_call(Server& server, int owner_global_rank, int64_t module_id,
                      bool training, Bytes structure, const std::string& mode,
                      const std::vector<at::Tensor>& tensors) {
  pipeline::RemoteResult result;
  {
    py::gil_scoped_release release;
    result =
        pipeline::remote_call(server.caller(), owner_global_rank, module_id,
                              training, structure.copy(), mode, tensors);
  }
  return py::make_tuple(py::bytes(result.structure), std::move(result.tensors),
                        std::move(result.changed_args), result.shares_memory,
                        std::move(result.views));
}

py::tuple await_output(Server& server) {
  pipeline::ModelOutput output;
  std::vector<at::Tensor> tensors;
  {
    py::gil_scoped_release release;
    output = server.announcements().await_output();
    std::vector<pipeline::RemoteRefPtr> refs;
    for (const auto& tensor : output.tensors) refs.push_back(tensor.ref);
    tensors = server.tensors().make_handles(refs);
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!refs[i]) tensors[i] = output.tensors[i].data;
      if (output.tensors[i].requires_grad) {
        pipeline::require_unused_grad(tensors[i]);
      }
    }
  }
  return py::make_tuple(py::bytes(output.structure), std::move(tensors));
}

at::Tensor fetch(Server& server, const at::Tensor& handle) {
  const auto ref = pipeline::remote_ref_of(handle);
  py::gil_scoped_release release;
  return server.tensors().fetch(ref);
}

// Computes arithmetic of two handles, or of a handle and a number, at their
// home.
at::Tensor compute(Server& server, const std::string& name,
                   const std::vector<at::Tensor>& handles, bool with_scalar,
                   double scalar) {
  py::gil_scoped_release release;
  std::vector<pipeline::RemoteRefPtr> refs;
  for (const auto& handle : handles) {
    refs.push_back(pipeline::remote_ref_of(handle));
  }
  return server.tensors().make_handle(server.caller().call_operation(
      pipeline::Operation::named(name, with_scalar, scalar), refs));
}

struct RefState {
  int home_rank;
  bool is_of_this_step;  // named here, and its data are not kept
};

std::optional<RefState> ref_state(const at::Tensor& tensor) {
  const auto ref = pipeline::remote_ref_of(tensor);
  if (!ref) return std::nullopt;
  return RefState{ref->home_rank, ref->releases && !ref->kept.defined()};
}

py::dict stats(const Server& server) {
  const pipeline::Scheduler::Stats scheduler = server.scheduler().stats();
  py::dict result;
  result["idle_s"] = static_cast<double>(scheduler.idle_ns) * 1e-9;
  result["contexts"] = scheduler.num_contexts;
  result["switches"] = scheduler.num_switches;
  const Server::Stats sent = server.stats();
  result["remote_calls"] = sent.requests;
  result["headers"] = sent.headers;
  result["pushes"] = sent.pushes;
  result["fetches"] = sent.fetches;
  int64_t data_bytes = 0;
  for (const auto& [rank, num_bytes] : sent.data_bytes) data_bytes += num_bytes;
  result["data_bytes"] = data_bytes;
  result["stored"] = server.num_stored();
  result["served_calls"] = server.num_served_calls();
  result["records"] = server.num_records();
  return result;
}

std::vector<std::string> executed_order(const Server& server) {
  std::vector<std::string> order;
  for (const schedule::TaskKey& key : server.scheduler().executed_order()) {
    order.push_back(schedule::to_string(key));
  }
  return order;
}

}  // namespace

void bind_pipeline(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<Server, std::shared_ptr<Server>>(
      m, "Server", "One rank's part in the pipeline; see pipeline/server.h.")
      .def(py::init(&make_server), py::arg("mailbox"), py::arg("faults"),
           py::kw_only(), py::arg("global_rank"), py::arg("pp_ranks"),
           py::arg("order_ranks"), py::arg("policy"), py::arg("num_chunks"),
           py::arg("active_microbatches"), py::arg("deterministic"),
           py::arg("device"), py::arg("timeout_s"),
           py::arg("timeline") = nullptr, py::arg("device_meter") = nullptr)
      .def("set_forward_handler", &set_forward_handler,
           "handler(module_id, mb, training, structure, tensors) -> "
           "(structure, tensors); runs a module on its owner.")
      .def("set_error_reporter",
           [](Server& server, py::function reporter) {
             server.set_error_reporter(
                 [kept = keep(std::move(reporter))](const std::string& where,
                                                    const std::string& what) {
                   py::gil_scoped_acquire gil;
                   // autograd leaves a Python exception set in this thread,
                   // besides the C++ exception that carries it.
                   PyErr_Clear();
                   try {
                     (*kept)(where, what);
                   } catch (py::error_already_set& e) {
                     e.discard_as_unraisable("the error reporter of smp");
                   }
                 });
           })
      .def(
          "set_microbatch_listeners",
          [](Server& server, pipeline::Steps::Listeners listeners) {
            server.steps().set_listeners(std::move(listeners));
          },
          release_gil(), py::arg("listeners"),
          "Objects that hear of the end of each microbatch, before Python "
          "does.")
      .def("set_microbatch_done",
           [](Server& server, py::function done) {
             server.steps().set_microbatch_done(
                 [kept = keep(std::move(done))](int mb) {
                   py::gil_scoped_acquire gil;
                   (*kept)(mb);
                 });
           })
      .def_property_readonly("is_driver", &Server::is_driver)
      .def_property_readonly("module_names", &Server::module_names)
      .def("add_modules", &Server::add_modules, release_gil(), py::arg("names"),
           py::arg("chunk_idxs"), py::arg("depth") = -1,
           "Takes in a model, between steps; returns its first module's id.")
      .def(
          "begin_step",
          [](Server& server, const std::string& name, int num_microbatches,
             const std::string& words) {
            const auto begun =
                server.steps().begin(name, num_microbatches, words);
            return std::make_pair(begun.num_microbatches, begun.words);
          },
          release_gil(), py::arg("name"), py::arg("num_microbatches"),
          py::arg("words") = "",
          "Opens the next step; returns the driver's number of microbatches "
          "and words.")
      .def("run_step", &run_step, py::arg("num_microbatches"), py::arg("seed"),
           py::arg("body"), "Runs body(mb) for each microbatch and serves.")
      .def(
          "remote_call", &remote_call, py::arg("owner_global_rank"),
          py::arg("module_id"), py::arg("training"), py::arg("structure"),
          py::arg("mode"), py::arg("tensors"),
          "Has a module run on its owner: structure and handles of the result, "
          "and which arguments it changed (their handles are the last).")
      .def(
          "seeds_of_next_calls",
          [](Server& server, const std::vector<int64_t>& module_ids) {
            return server.caller().seeds_of_next_calls(module_ids);
          },
          py::arg("module_ids"),
          "Of modules on other ranks that are called one by one.")
      .def(
          "skip_calls",
          [](Server& server, int num_calls) {
            server.caller().skip_calls(num_calls);
          },
          py::arg("num_calls"),
          "Counts calls that were made as a part of another one.")
      .def("set_handle_factory", &set_handle_factory,
           "factory(sizes, dtype) -> tensor without data")
      .def("fetch", &fetch, py::arg("handle"), "The data, not to be changed.")
      .def(
          "materialize",
          [](Server& server, const at::Tensor& handle) {
            py::gil_scoped_release release;
            return pipeline::materialize(server.tensors(), handle);
          },
          py::arg("handle"), "The data as a tensor behind the handle's graph.")
      .def("compute", &compute, py::arg("name"), py::arg("handles"),
           py::arg("with_scalar"), py::arg("scalar"),
           "Arithmetic at the home of the handles.")
      .def(
          "publish_output",
          [](Server& server, Bytes structure,
             const std::vector<at::Tensor>& tensors) {
            py::gil_scoped_release release;
            server.announcements().publish_output(structure.copy(), tensors);
          },
          py::arg("structure"), py::arg("tensors"),
          "Driver: the model's output for the others.")
      .def("await_output", &await_output, "Others: the model's output.")
      .def(
          "begin_backward",
          [](Server& server) { server.steps().begin_backward(); },
          release_gil())
      .def(
          "end_backward",
          [](Server& server) { server.announcements().end_backward(); },
          release_gil())
      .def(
          "await_backward",
          [](Server& server) { server.announcements().await_backward(); },
          release_gil())
      .def("stats", &stats)
      .def(
          "data_bytes_to",
          [](const Server& server) { return server.stats().data_bytes; },
          "Bytes of tensors sent since the beginning, by global rank.")
      .def("executed_order", &executed_order,
           "Tasks of the last step in the order in which they began.")
      .def(
          "executed_actions",
          [](const Server& server) {
            return server.scheduler().executed_actions();
          },
          "The last step in the text form of a schedule.")
      .def("close", &Server::close, release_gil());
  m.def(
      "in_context", [] { return pipeline::current_context() != nullptr; },
      "True inside a step body or the service of a request.");
  py::class_<pipeline::ViewOfArgument>(m, "ViewOfArgument")
      .def_readonly("result_idx", &pipeline::ViewOfArgument::result_idx)
      .def_readonly("argument_idx", &pipeline::ViewOfArgument::argument_idx)
      .def_readonly("sizes", &pipeline::ViewOfArgument::sizes)
      .def_readonly("strides", &pipeline::ViewOfArgument::strides)
      .def_readonly("offset", &pipeline::ViewOfArgument::offset);
  py::class_<RefState>(m, "RefState", "What is known of a handle.")
      .def_readonly("home_rank", &RefState::home_rank)
      .def_readonly("is_of_this_step", &RefState::is_of_this_step);
  m.def("ref_state", &ref_state, py::arg("tensor"),
        "Of a handle; None for an ordinary tensor.");
  m.def(
      "link_view",
      [](const at::Tensor& view, const at::Tensor& base, py::function spread) {
        pipeline::link_view(
            view, base,
            [kept = keep(std::move(spread))](const at::Tensor& grad) {
              py::gil_scoped_acquire gil;
              return (*kept)(grad).cast<at::Tensor>();
            });
      },
      py::arg("view"), py::arg("base"), py::arg("spread"));
  m.def(
      "share_ref",
      [](const at::Tensor& handle, const at::Tensor& source) {
        pipeline::attach_remote_ref(handle, pipeline::remote_ref_of(source));
      },
      py::arg("handle"), py::arg("source"),
      "Makes a tensor without data stand for what another handle stands for.");
}

}  // namespace smp::bindings
