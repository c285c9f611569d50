#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "csrc/bindings/bytes.h"
#include "csrc/bindings/end_without_gil.h"
#include "csrc/bindings/waits.h"
#include "csrc/comm/agreement.h"
#include "csrc/comm/broadcast.h"
#include "csrc/comm/c10d_communicator.h"
#include "csrc/comm/communicator.h"
#include "csrc/comm/flight_watch.h"
#include "csrc/comm/group_wait.h"
#include "csrc/comm/hierarchical_communicator.h"
#include "csrc/comm/mpi_communicator.h"
#include "csrc/comm/peer_sockets.h"
#include "csrc/comm/socket_communicator.h"
#include "csrc/comm/watched_communicator.h"
#include "csrc/common/check.h"
#include "csrc/common/without_gil.h"
#include "csrc/health/fault_board.h"
#include "csrc/memory/device_scope.h"

namespace py = pybind11;

namespace smp::bindings {

using comm::Communicator;
using comm::ReduceOp;
using comm::Work;

namespace {

// Returns a function that ends a backend; it may be called and dropped in any
// thread.
std::function<void()> end_of(std::optional<py::function> end) {
  if (!end) return nullptr;
  const std::shared_ptr<py::function> kept(new py::function(*std::move(end)),
                                           [](py::function* last) {
                                             const py::gil_scoped_acquire gil;
                                             delete last;
                                           });
  return [kept] {
    const py::gil_scoped_acquire gil;
    try {
      (*kept)();
    } catch (py::error_already_set& e) {
      throw Error(rank_prefix() + e.what());
    }
  };
}

comm::CommunicatorPtr make_c10d(c10::intrusive_ptr<c10d::Backend> backend,
                                std::string name, const std::string& device,
                                std::optional<py::function> end) {
  comm::C10dOptions options{.device = c10::Device(device),
                            .end = end_of(std::move(end))};
  const py::gil_scoped_release released;
  return comm::make_c10d_communicator(std::move(backend), std::move(name),
                                      std::move(options));
}

comm::FlightWatchPtr make_flight_watch(FaultsPtr board,
                                       const std::string& device,
                                       double timeout_s, double report_s) {
  comm::FlightWatch::Options options;
  options.timeout = to_ms(timeout_s);
  options.report_after = to_ms(report_s);
  options.begin_thread = [device = c10::Device(device)] {
    memory::enter_device(device);
  };
  return std::make_shared<comm::FlightWatch>(std::move(board), options);
}

std::shared_ptr<comm::PeerSockets> make_sockets(int global_rank,
                                                std::string address,
                                                Bytes secret, int world_size) {
  const py::gil_scoped_release released;
  comm::PeerSockets::Options options;
  options.address = std::move(address);
  options.secret = secret.copy();
  options.door.max_half_open += static_cast<size_t>(world_size);
  return end_without_gil(
      new comm::PeerSockets(global_rank, std::move(options)));
}

void bind_sockets(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using comm::PeerSockets;
  py::class_<PeerSockets, std::shared_ptr<PeerSockets>>(
      m, "PeerSockets",
      "TCP connections from this process to other ranks, opened when they are "
      "first used and shared by all groups.")
      .def(py::init(&make_sockets), py::arg("global_rank"), py::kw_only(),
           py::arg("address"), py::arg("secret"), py::arg("world_size"))
      .def_property_readonly("address", &PeerSockets::address,
                             "Where others reach this process.")
      .def("set_addresses", &PeerSockets::set_addresses, py::arg("addresses"),
           NoGil(), "Those of all ranks.")
      .def("close", &PeerSockets::close, NoGil());
  m.def("make_socket_communicator", &comm::make_socket_communicator,
        py::arg("sockets"), py::arg("name"), py::arg("global_ranks"), NoGil(),
        "Communicator of a group over the connections of this process; CPU "
        "tensors. The name is used once.");
  m.def("own_address", &comm::own_address, py::arg("interface"),
        py::arg("towards"), NoGil(),
        "The numeric address by which other hosts reach this one: that of an "
        "interface, or of the way to a host.");
}

void run_without_gil(const std::function<void()>& body) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return body();
  py::gil_scoped_release released;
  body();
}

void bind_communicator(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::enum_<ReduceOp>(m, "ReduceOp", "How a collective combines values.")
      .value("SUM", ReduceOp::kSum)
      .value("MAX", ReduceOp::kMax)
      .value("MIN", ReduceOp::kMin);

  py::class_<Work, std::shared_ptr<Work>>(
      m, "Work", "One operation in flight; keeps its tensors alive.")
      .def(
          "wait",
          [](Work& work, double timeout_s) {
            comm::wait_within(work, to_ms(timeout_s));
          },
          py::arg("timeout_s"), NoGil(),
          "Blocks until finished; RuntimeError when it failed, was aborted or "
          "timed out, or when a rank has failed that the library knows of.")
      .def("done", &Work::done, NoGil())
      .def("abort", &Work::abort, NoGil());

  py::class_<Communicator, std::shared_ptr<Communicator>>(
      m, "Communicator",
      "A group of ranks that exchange contiguous tensors; ranks are group "
      "ranks. Every operation returns a Work at once.")
      .def_property_readonly("group_rank", &Communicator::group_rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("is_stream_ordered",
                             &Communicator::is_stream_ordered,
                             "Collectives run on streams of a device.")
      .def("send", &Communicator::send, py::arg("tensor"), py::arg("dst"),
           py::arg("tag") = 0, NoGil())
      .def("recv", &Communicator::recv, py::arg("tensor"), py::arg("src"),
           py::arg("tag") = 0, NoGil())
      .def("all_reduce", &Communicator::all_reduce, py::arg("tensor"),
           py::arg("op") = ReduceOp::kSum, NoGil())
      .def("broadcast", &Communicator::broadcast, py::arg("tensor"),
           py::arg("root"), NoGil())
      .def("all_gather", &Communicator::all_gather, py::arg("output"),
           py::arg("input"), NoGil(), "output [size * n], input [n].")
      .def("reduce_scatter", &Communicator::reduce_scatter, py::arg("output"),
           py::arg("input"), py::arg("op") = ReduceOp::kSum, NoGil(),
           "output [n], input [size * n].")
      .def("all_to_all", &Communicator::all_to_all, py::arg("output"),
           py::arg("input"), NoGil(),
           "Both [size * n]: part i of the input goes to group rank i.")
      .def("all_to_all_v", &Communicator::all_to_all_v, py::arg("output"),
           py::arg("input"), py::arg("output_counts"), py::arg("input_counts"),
           NoGil(),
           "Parts of any size, by group rank; what a rank sends is what the "
           "receiver expects.")
      .def("barrier", &Communicator::barrier, NoGil())
      .def("abort", &Communicator::abort, NoGil(),
           "Ends all waits in this process with an error; further calls "
           "raise.")
      .def("shut_down", &Communicator::shut_down, NoGil(),
           "Ends a group of a device that no rank needs any more. Collective, "
           "in one order of all groups.");
}

void bind_agreements(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def(
      "follow",
      [](Work& work, const Communicator& group, const std::string& what,
         FaultsPtr faults, std::vector<int> ranks, double timeout_s) {
        comm::follow(
            work,
            make_wait_options(timeout_s, std::move(faults), std::move(ranks)),
            group, what);
      },
      NoGil(), py::arg("work"), py::arg("group"), py::kw_only(),
      py::arg("what"), py::arg("faults") = py::none(),
      py::arg("ranks") = std::vector<int>(), py::arg("timeout_s") = 1800.0,
      "Lets later work on the current stream use the result; the host waits "
      "only for operations that are not a device's.");
  m.def(
      "broadcast_coalesced",
      [](const std::vector<at::Tensor>& tensors, Communicator& group, int root,
         FaultsPtr faults, std::vector<int> ranks, double timeout_s) {
        comm::broadcast_coalesced(
            tensors, group, root,
            make_wait_options(timeout_s, std::move(faults), std::move(ranks)));
      },
      NoGil(), py::arg("tensors"), py::arg("group"), py::arg("root"),
      py::kw_only(), py::arg("faults") = py::none(),
      py::arg("ranks") = std::vector<int>(), py::arg("timeout_s") = 1800.0,
      "Overwrites tensors with those of group rank `root`. Collective.");
  m.def(
      "agree_on_maxima",
      [](const std::vector<int64_t>& values, Communicator& group,
         const std::string& what, FaultsPtr faults, std::vector<int> ranks,
         double timeout_s) {
        return comm::agree_on_maxima(
            group, values,
            make_wait_options(timeout_s, std::move(faults), std::move(ranks)),
            what);
      },
      NoGil(), py::arg("values"), py::arg("group"), py::kw_only(),
      py::arg("what"), py::arg("faults") = py::none(),
      py::arg("ranks") = std::vector<int>(), py::arg("timeout_s") = 1800.0,
      "The largest of each integer over a group of the host. Collective.");
  m.def(
      "gather_host_numbers",
      [](const std::vector<double>& numbers, Communicator& group,
         const std::string& what, FaultsPtr faults, std::vector<int> ranks,
         double timeout_s) {
        const at::Tensor all = comm::gather_numbers(
            group, at::tensor(numbers, at::kDouble),
            make_wait_options(timeout_s, std::move(faults), std::move(ranks)),
            what);
        const double* begin = all.const_data_ptr<double>();
        const auto num_each = static_cast<int64_t>(numbers.size());
        std::vector<std::vector<double>> by_rank;
        for (int64_t rank = 0; rank < group.size(); ++rank) {
          const double* own = begin + rank * num_each;
          by_rank.emplace_back(own, own + num_each);
        }
        return by_rank;
      },
      NoGil(), py::arg("numbers"), py::arg("group"), py::kw_only(),
      py::arg("what"), py::arg("faults") = py::none(),
      py::arg("ranks") = std::vector<int>(), py::arg("timeout_s") = 1800.0,
      "Numbers of all ranks of a group of the host, by group rank. "
      "Collective.");
  m.def(
      "gather_numbers",
      [](const at::Tensor& numbers, Communicator& group,
         const std::string& what, FaultsPtr faults, std::vector<int> ranks,
         double timeout_s) {
        return comm::gather_numbers(
            group, numbers,
            make_wait_options(timeout_s, std::move(faults), std::move(ranks)),
            what);
      },
      NoGil(), py::arg("numbers"), py::arg("group"), py::kw_only(),
      py::arg("what"), py::arg("faults") = py::none(),
      py::arg("ranks") = std::vector<int>(), py::arg("timeout_s") = 1800.0,
      "Numbers of all ranks, [size, n] of [n], by group rank, on the same "
      "device, for which the host does not wait. Collective.");
}

}  // namespace

void bind_comm(py::module_& m) {
  set_gil_release(run_without_gil);
  using NoGil = py::call_guard<py::gil_scoped_release>;
  bind_communicator(m);
  bind_sockets(m);
  m.def("make_c10d_communicator", &make_c10d, py::arg("backend"),
        py::arg("name"), py::arg("device") = "cpu", py::arg("end") = py::none(),
        "Communicator over a torch.distributed Backend, such as "
        "ProcessGroupGloo, that nothing else uses. `end` ends what it has on "
        "its way, where its base class has no `abort`.");
  m.def("mpi_available", &comm::mpi_available,
        "Whether this build has the MPI adapter.");
  m.def("make_mpi_world", &comm::make_mpi_world, NoGil(),
        "Communicator over all processes of the MPI job; starts MPI. "
        "Collective.");
  m.def("make_mpi_group", &comm::make_mpi_group, py::arg("global_ranks"),
        NoGil(), "Communicator over some of them. Collective over these.");
  m.def("mpi_finalize", &comm::mpi_finalize, NoGil(),
        "Ends MPI if smp started it. Collective.");
  py::class_<comm::FlightWatch, comm::FlightWatchPtr>(
      m, "FlightWatch",
      "Watches collectives of devices, for which no host waits; see "
      "comm/flight_watch.h.")
      .def(py::init(&make_flight_watch), py::arg("board"), py::arg("device"),
           py::kw_only(), py::arg("timeout_s"), py::arg("report_after_s"));
  m.def(
      "make_hierarchical_communicator",
      [](comm::CommunicatorPtr flat, comm::CommunicatorPtr scatter,
         comm::CommunicatorPtr across, comm::CommunicatorPtr gather,
         bool is_host_by_host) {
        return comm::make_hierarchical_communicator(
            {std::move(flat), std::move(scatter), std::move(across),
             std::move(gather), is_host_by_host});
      },
      py::arg("flat"), py::kw_only(), py::arg("scatter"), py::arg("across"),
      py::arg("gather"), py::arg("is_host_by_host"), NoGil(),
      "`flat`, whose sums go within hosts, across them, and within them; of "
      "host tensors. See comm/hierarchical_communicator.h.");
  m.def("watch_collectives", &comm::make_watched_communicator, py::arg("inner"),
        py::arg("board"), py::arg("ranks"), py::arg("flights") = py::none(),
        NoGil(),
        "`inner`, whose collectives the board numbers, so that one that all "
        "ranks have entered is not taken for a deadlock. Those of a device are "
        "watched by `flights`.");
  bind_agreements(m);
}

}  // namespace smp::bindings
