#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/fault_board.h"
#include "csrc/comm/link_probe.h"
#include "csrc/comm/liveness.h"
#include "csrc/comm/mailbox.h"
#include "csrc/comm/object_exchange.h"
#include "csrc/comm/shared_memory.h"
#include "csrc/comm/stop_agreement.h"
#include "csrc/comm/test_delays.h"
#include "csrc/comm/watched_communicator.h"

namespace py = pybind11;

namespace smp::bindings {

using comm::FaultBoard;
using comm::LinkProbe;
using comm::LivenessClient;
using comm::LivenessHub;
using comm::Mailbox;
using comm::ObjectExchange;
using comm::SharedMemory;
using comm::StopAgreement;

namespace {

using release_gil = py::call_guard<py::gil_scoped_release>;

std::chrono::milliseconds to_ms(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

// Dropping the last reference joins threads, which may need the GIL to end.
// The one who drops it may be Python or another object of ours.
template <typename T>
std::shared_ptr<T> without_gil_at_end(T* object) {
  return {object, [](T* ended) {
            std::optional<py::gil_scoped_release> release;
            if (PyGILState_Check() != 0) release.emplace();
            delete ended;
          }};
}

std::shared_ptr<FaultBoard> make_fault_board(int global_rank) {
  auto board = std::make_shared<FaultBoard>(global_rank);
  board->set_interrupt_check([] {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
  return board;
}

std::optional<std::string> fault_text(const FaultBoard& board) {
  const auto fault = board.fault();
  if (!fault) return std::nullopt;
  return fault->describe();
}

std::optional<int> fault_rank(const FaultBoard& board) {
  const auto fault = board.fault();
  if (!fault || fault->global_rank < 0) return std::nullopt;
  return fault->global_rank;
}

void report_raised(FaultBoard& board, std::string where, std::string text) {
  board.report({.kind = comm::Fault::Kind::kRaised,
                .global_rank = board.global_rank(),
                .where = std::move(where),
                .text = std::move(text)});
}

py::dict activity(FaultBoard& board) {
  const auto snapshot = board.waits().snapshot();
  py::dict result;
  result["blocked"] = snapshot.is_blocked;
  result["what"] = snapshot.what;
  result["progress"] = snapshot.progress;
  result["unsent"] = snapshot.num_unsent;
  return result;
}

std::shared_ptr<LivenessHub> make_hub(int world_size, bool loopback_only,
                                      std::string token,
                                      double deadlock_after_s,
                                      double hang_after_s) {
  LivenessHub::Options options;
  options.deadlock_after = to_ms(deadlock_after_s);
  options.hang_after = to_ms(hang_after_s);
  return without_gil_at_end(
      new LivenessHub(world_size, loopback_only, std::move(token), options));
}

std::shared_ptr<LivenessClient> make_client(
    const std::string& host, int port, std::string token, int global_rank,
    std::shared_ptr<FaultBoard> board, double connect_timeout_s,
    std::shared_ptr<StopAgreement> stops,
    std::optional<std::pair<int, int>> stacks_signals, int stacks_fd,
    double hang_after_s) {
  LivenessClient::Options options;
  options.hang_after = to_ms(hang_after_s);
  options.connect_timeout = to_ms(connect_timeout_s);
  options.stops = std::move(stops);
  if (stacks_signals) {
    options.stacks = comm::StackDump(stacks_signals->first,
                                     stacks_signals->second, stacks_fd);
  }
  py::gil_scoped_release release;
  return without_gil_at_end(new LivenessClient(
      host, port, std::move(token), global_rank, std::move(board), options));
}

comm::SharedMemoryPtr connect_shared_memory(
    const comm::CommunicatorPtr& world,
    const std::shared_ptr<FaultBoard>& board, std::string machine, bool enabled,
    int64_t ring_bytes, double timeout_s) {
  return comm::connect_shared_memory(*world, *board,
                                     {.enabled = enabled,
                                      .ring_bytes = ring_bytes,
                                      .machine = std::move(machine),
                                      .timeout = to_ms(timeout_s)});
}

std::shared_ptr<Mailbox> make_mailbox(
    comm::CommunicatorPtr world, std::shared_ptr<FaultBoard> board,
    const comm::SharedMemoryPtr& shared_memory) {
  return without_gil_at_end(
      new Mailbox(std::move(world), std::move(board), shared_memory));
}

void add_traffic(py::dict& result, const std::string& prefix,
                 const comm::Traffic& traffic) {
  auto set = [&](const char* name, int64_t value) {
    result[py::str(prefix + name)] = value;
  };
  set("messages_sent", traffic.messages_sent);
  set("bytes_sent", traffic.bytes_sent);
  set("messages_received", traffic.messages_received);
  set("bytes_received", traffic.bytes_received);
}

py::dict mailbox_stats(const Mailbox& mailbox) {
  const Mailbox::Stats stats = mailbox.stats();
  py::dict result;
  add_traffic(result, "", stats);
  add_traffic(result, "shared_memory_", stats.shared_memory);
  return result;
}

std::shared_ptr<LinkProbe> make_probe(std::shared_ptr<Mailbox> mailbox,
                                      std::shared_ptr<FaultBoard> board) {
  return without_gil_at_end(
      new LinkProbe(std::move(mailbox), std::move(board)));
}

std::vector<std::pair<double, double>> probe_link(LinkProbe& probe, int peer,
                                                  int64_t num_bytes,
                                                  int64_t repeats,
                                                  double timeout_s) {
  std::vector<std::pair<double, double>> result;
  for (const LinkProbe::Sample& sample :
       probe.measure(peer, num_bytes, repeats, to_ms(timeout_s))) {
    result.emplace_back(static_cast<double>(sample.one_way_ns) * 1e-9,
                        static_cast<double>(sample.round_trip_ns) * 1e-9);
  }
  return result;
}

std::shared_ptr<ObjectExchange> make_exchange(std::shared_ptr<Mailbox> mailbox,
                                              std::shared_ptr<FaultBoard> board,
                                              double timeout_s) {
  return without_gil_at_end(new ObjectExchange(
      std::move(mailbox), std::move(board), to_ms(timeout_s)));
}

py::bytes recv(ObjectExchange& exchange, int src) {
  std::string bytes;
  {
    py::gil_scoped_release release;
    bytes = exchange.recv(src);
  }
  return bytes;
}

py::list all_gather(ObjectExchange& exchange, const std::vector<int>& ranks,
                    std::string bytes, const std::string& what) {
  std::vector<std::string> gathered;
  {
    py::gil_scoped_release release;
    gathered = exchange.all_gather(ranks, std::move(bytes), what);
  }
  py::list result;
  for (const std::string& one : gathered) result.append(py::bytes(one));
  return result;
}

void bind_fault_board(py::module_& m) {
  py::class_<FaultBoard, std::shared_ptr<FaultBoard>>(
      m, "FaultBoard", "What this process knows about failures of all ranks.")
      .def(py::init(&make_fault_board), py::arg("global_rank"))
      .def_property_readonly("global_rank", &FaultBoard::global_rank)
      .def("set_coordinates", &FaultBoard::set_coordinates, release_gil(),
           py::arg("per_global_rank"),
           "Words for each rank, such as \"pp 1 tp 0 rdp 1\".")
      .def("report_raised", &report_raised, release_gil(), py::arg("where"),
           py::arg("text"),
           "Records an exception of this rank; the liveness client tells it "
           "to the others.")
      .def("raise_if_faulted", &FaultBoard::raise_if_faulted, release_gil())
      .def("fault_text", &fault_text, release_gil(),
           "The first fault in words, or None.")
      .def("fault_rank", &fault_rank, release_gil(),
           "Its global rank, or None.")
      .def("has_left", &FaultBoard::has_left, release_gil(),
           py::arg("global_rank"))
      .def("activity", &activity,
           "What this process waits for: blocked, what, progress, unsent.")
      .def(
          "set_activity",
          [](FaultBoard& board, std::string text) {
            board.waits().set_activity(std::move(text));
          },
          py::arg("text"), "What this process works on, for reports.");

  py::class_<StopAgreement, std::shared_ptr<StopAgreement>>(
      m, "StopAgreement", "Finds a boundary at which all ranks can stop.")
      .def(py::init<std::shared_ptr<FaultBoard>>(), py::arg("board"))
      .def("freeze", &StopAgreement::freeze, release_gil(),
           "From now on `arrive` waits; the number of the next boundary.")
      .def("decide", &StopAgreement::decide, release_gil(), py::arg("boundary"))
      .def(
          "arrive",
          [](StopAgreement& stops, double timeout_s) {
            return stops.arrive(to_ms(timeout_s));
          },
          py::arg("timeout_s"), release_gil(),
          "Passes a boundary; whether all ranks stop here.")
      .def_property_readonly("is_asked", &StopAgreement::is_asked);
}

void bind_liveness(py::module_& m) {
  py::class_<LivenessHub, std::shared_ptr<LivenessHub>>(
      m, "LivenessHub", "Hosted by rank 0: tells all ranks who has died.")
      .def(py::init(&make_hub), py::arg("world_size"), py::kw_only(),
           py::arg("loopback_only"), py::arg("token"),
           py::arg("deadlock_after_s") = 5.0, py::arg("hang_after_s") = 0.0)
      .def_property_readonly("port", &LivenessHub::port)
      .def(
          "close",
          [](LivenessHub& hub, double linger_s) { hub.close(to_ms(linger_s)); },
          py::arg("linger_s") = 0.0, release_gil(),
          "Waits up to linger_s for all ranks to leave, then ends.");

  py::class_<LivenessClient, std::shared_ptr<LivenessClient>>(
      m, "LivenessClient", "Connection of one rank to the hub.")
      .def(py::init(&make_client), py::arg("host"), py::arg("port"),
           py::kw_only(), py::arg("token"), py::arg("global_rank"),
           py::arg("board"), py::arg("connect_timeout_s") = 60.0,
           py::arg("stops") = nullptr, py::arg("stacks_signals") = py::none(),
           py::arg("stacks_fd") = -1, py::arg("hang_after_s") = 0.0)
      .def("request_stop", &LivenessClient::request_stop, release_gil(),
           "Asks all ranks to stop at one boundary.")
      .def("report_raised", &LivenessClient::report_raised, release_gil(),
           py::arg("where"), py::arg("text"),
           "Tells all ranks of an exception of this rank.")
      .def("leave", &LivenessClient::leave, release_gil(),
           "Says goodbye; the end of this process is no fault any more.")
      .def("close", &LivenessClient::close, release_gil());
}

void bind_mailbox(py::module_& m) {
  m.def("watch_collectives", &comm::make_watched_communicator, py::arg("inner"),
        py::arg("board"), py::arg("ranks"),
        "`inner`, whose collectives the board numbers, so that one that all "
        "ranks have entered is not taken for a deadlock.");
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(
      m, "SharedMemory", "Memory shared with other ranks of this host.")
      .def_property_readonly("peers", &SharedMemory::peers,
                             "Global ranks that it is shared with.");
  m.def("connect_shared_memory", &connect_shared_memory, release_gil(),
        py::arg("world"), py::arg("board"), py::kw_only(), py::arg("machine"),
        py::arg("enabled") = true, py::arg("ring_bytes") = 8 << 20,
        py::arg("timeout_s") = 1800.0,
        "Collective: finds the ranks that can share memory.");

  py::class_<Mailbox, std::shared_ptr<Mailbox>>(
      m, "Mailbox", "Messages of all channels between all ranks.")
      .def(py::init(&make_mailbox), py::arg("world"), py::arg("board"),
           py::arg("shared_memory") = nullptr)
      .def("stats", &mailbox_stats)
      .def("num_unsent", &Mailbox::num_unsent, release_gil())
      .def("progress", &Mailbox::progress)
      .def(
          "close",
          [](Mailbox& mailbox, double timeout_s) {
            mailbox.close(to_ms(timeout_s));
          },
          py::arg("timeout_s") = 5.0, release_gil(),
          "Sends what is posted, then ends all threads.");

  py::class_<LinkProbe, std::shared_ptr<LinkProbe>>(
      m, "LinkProbe", "Measures the way to another rank.")
      .def(py::init(&make_probe), py::arg("mailbox"), py::arg("board"))
      .def("measure", &probe_link, release_gil(), py::arg("peer"),
           py::arg("num_bytes"), py::arg("repeats"),
           py::arg("timeout_s") = 60.0,
           "(one way, round trip) in seconds of each message; the peer has a "
           "probe too.");
}

}  // namespace

void bind_comm(py::module_& m) {
  bind_fault_board(m);
  bind_liveness(m);

  bind_mailbox(m);
  m.def("set_delays", &comm::TestDelays::set, py::arg("seed"),
        py::arg("max_us"),
        "Random pauses in the transport of this process; 0 ends them.");

  py::class_<ObjectExchange, std::shared_ptr<ObjectExchange>>(
      m, "ObjectExchange", "Byte strings between ranks; every call blocks.")
      .def(py::init(&make_exchange), py::arg("mailbox"), py::arg("board"),
           py::arg("timeout_s") = 1800.0)
      .def(
          "set_timeout",
          [](ObjectExchange& exchange, double timeout_s) {
            exchange.set_timeout(to_ms(timeout_s));
          },
          py::arg("timeout_s"), release_gil())
      .def("send", &ObjectExchange::send, release_gil(), py::arg("dst"),
           py::arg("data"), "Returns when dst has called recv.")
      .def("recv", &recv, py::arg("src"),
           "The next object that src sent or broadcast.")
      .def("broadcast", &ObjectExchange::broadcast, release_gil(),
           py::arg("ranks"), py::arg("data"),
           "By the sender only; returns when all others have called recv.")
      .def("all_gather", &all_gather, py::arg("ranks"), py::arg("data"),
           py::arg("what") = "all_gather",
           "Collective: the bytes of all, in the order of ranks.")
      .def("barrier", &ObjectExchange::barrier, release_gil(), py::arg("ranks"),
           py::arg("what") = "barrier", "Collective.");
}

}  // namespace smp::bindings
