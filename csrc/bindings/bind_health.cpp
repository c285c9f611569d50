#include <pybind11/stl.h>
#include <signal.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bytes.h"
#include "csrc/bindings/end_without_gil.h"
#include "csrc/bindings/waits.h"
#include "csrc/health/fault_board.h"
#include "csrc/health/handshake.h"
#include "csrc/health/liveness.h"
#include "csrc/health/stop_agreement.h"
#include "csrc/memory/device_scope.h"

namespace py = pybind11;

namespace smp::bindings {

using health::FaultBoard;
using health::Handshake;
using health::LivenessClient;
using health::LivenessHub;
using health::StopAgreement;

namespace {

using release_gil = py::call_guard<py::gil_scoped_release>;

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

std::optional<std::string> kind_of(const std::optional<health::Fault>& fault) {
  using Kind = health::Fault::Kind;
  if (!fault) return std::nullopt;
  switch (fault->kind) {
    case Kind::kRaised:
      return "raised";
    case Kind::kDied:
      return "died";
    case Kind::kUnreachable:
      return "unreachable";
    case Kind::kLeft:
      return "left";
    case Kind::kDeadlock:
      return "deadlock";
    case Kind::kStuck:
      return "stuck";
  }
  return std::nullopt;
}

std::optional<std::string> fault_kind(const FaultBoard& board) {
  return kind_of(board.fault());
}

std::optional<std::tuple<std::string, int, std::string>> known_fault(
    const FaultBoard& board) {
  const auto fault = board.known_fault();
  if (!fault) return std::nullopt;
  return std::make_tuple(*kind_of(fault), fault->global_rank,
                         fault->headline());
}

void report_raised(FaultBoard& board, std::string where, std::string text) {
  board.report({.kind = health::Fault::Kind::kRaised,
                .global_rank = board.global_rank(),
                .where = std::move(where),
                .text = std::move(text)});
}

void report_lost(FaultBoard& board, int global_rank, std::string text) {
  board.report({.kind = health::Fault::Kind::kDied,
                .global_rank = global_rank,
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

std::shared_ptr<LivenessHub> make_hub(int world_size,
                                      const std::string& address, Bytes secret,
                                      double deadlock_after_s,
                                      double hang_after_s, bool hang_raises) {
  LivenessHub::Options options;
  options.deadlock_after = to_ms(deadlock_after_s);
  options.hang_after = to_ms(hang_after_s);
  options.hang_raises = hang_raises;
  return end_without_gil(
      new LivenessHub(world_size, address, secret.copy(), options));
}

std::shared_ptr<LivenessClient> make_client(
    const std::string& host, int port, Bytes secret, int global_rank,
    std::shared_ptr<FaultBoard> board, double connect_timeout_s,
    std::shared_ptr<StopAgreement> stops,
    std::optional<std::array<int, 3>> stacks_signals, int stacks_fd,
    double hang_after_s, bool hang_raises, int interrupt_signal,
    const std::string& device) {
  LivenessClient::Options options;
  options.begin_thread = [device = c10::Device(device)] {
    memory::enter_device(device);
  };
  options.hang_after = to_ms(hang_after_s);
  options.hang_raises = hang_raises;
  if (interrupt_signal > 0) {
    options.interrupt_script = [interrupt_signal] {
      ::kill(::getpid(), interrupt_signal);  // its handler is Python's
    };
  }
  options.connect_timeout = to_ms(connect_timeout_s);
  options.stops = std::move(stops);
  if (stacks_signals) {
    const auto [all, own, native] = *stacks_signals;
    options.stacks = health::StackDump(all, own, stacks_fd, native);
  }
  py::gil_scoped_release release;
  return end_without_gil(new LivenessClient(
      host, port, secret.copy(), global_rank, std::move(board), options));
}

void bind_fault_board(py::module_& m) {
  py::class_<FaultBoard, std::shared_ptr<FaultBoard>>(
      m, "FaultBoard", "What this process knows about failures of all ranks.")
      .def(py::init(&make_fault_board), py::arg("global_rank"))
      .def_property_readonly("global_rank", &FaultBoard::global_rank)
      .def("set_coordinates", &FaultBoard::set_coordinates, release_gil(),
           py::arg("per_global_rank"),
           "Words for each rank, such as \"pp 1 tp 0 rdp 1\".")
      .def("set_addresses", &FaultBoard::set_addresses, release_gil(),
           py::arg("per_global_rank"),
           "Where the host of each rank is reached; empty: not known.")
      .def("report_raised", &report_raised, release_gil(), py::arg("where"),
           py::arg("text"),
           "Records an exception of this rank; the liveness client tells it "
           "to the others.")
      .def("report_lost", &report_lost, release_gil(), py::arg("global_rank"),
           py::arg("text"), "Records that another rank is lost.")
      .def("raise_if_faulted", &FaultBoard::raise_if_faulted, release_gil())
      .def("fault_text", &fault_text, release_gil(),
           "The first fault in words, or None.")
      .def("fault_rank", &fault_rank, release_gil(),
           "Its global rank, or None.")
      .def("fault_kind", &fault_kind, release_gil(),
           "How it failed: raised, died, unreachable, left, deadlock or stuck; "
           "or None.")
      .def("known_fault", &known_fault, release_gil(),
           "Its kind, global rank (or -1) and headline, also while it is "
           "hidden; or None.")
      .def(
          "hold",
          [](FaultBoard& board, std::vector<int> needed, double limit_s) {
            board.hold(std::move(needed), to_ms(limit_s));
          },
          release_gil(), py::arg("needed"), py::arg("limit_s"),
          "Hides faults of other ranks, each for a time, until `release`.")
      .def("release", &FaultBoard::release, release_gil())
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

// Returns the bytes of the handshake among those received, and the bytes to
// send.
py::typing::Tuple<py::int_, py::bytes> advance(Handshake& handshake,
                                               Bytes received) {
  std::string out;
  const size_t used = handshake.advance(received.view, out);
  return py::make_tuple(used, py::bytes(out));
}

void bind_handshake(py::module_& m) {
  py::class_<Handshake>(
      m, "Handshake",
      "One side of the proof that both ends of a connection know the secret.")
      .def_static(
          "listener",
          [](Bytes secret, std::string purpose) {
            return Handshake::listener(secret.copy(), std::move(purpose));
          },
          py::arg("secret"), py::arg("purpose"))
      .def_static(
          "caller",
          [](Bytes secret, std::string purpose, int32_t number) {
            return Handshake::caller(secret.copy(), std::move(purpose), number);
          },
          py::arg("secret"), py::arg("purpose"), py::arg("number"))
      .def("advance", &advance, py::arg("received"),
           "Takes bytes; how many belong to it, and the bytes to send. "
           "RuntimeError when the other side does not know the secret.")
      .def_property_readonly("is_proven", &Handshake::is_proven);
  m.attr("MIN_SECRET_BYTES") = health::kMinSecretBytes;
}

void bind_liveness(py::module_& m) {
  py::class_<LivenessHub, std::shared_ptr<LivenessHub>>(
      m, "LivenessHub",
      "Hosted by rank 0: tells all ranks which of them have died.")
      .def(py::init(&make_hub), py::arg("world_size"), py::kw_only(),
           py::arg("address"), py::arg("secret"),
           py::arg("deadlock_after_s") = 5.0, py::arg("hang_after_s") = 0.0,
           py::arg("hang_raises") = false)
      .def_property_readonly("port", &LivenessHub::port)
      .def(
          "close",
          [](LivenessHub& hub, double linger_s) { hub.close(to_ms(linger_s)); },
          py::arg("linger_s") = 0.0, release_gil(),
          "Waits up to linger_s for all ranks to leave, then ends.");

  py::class_<LivenessClient, std::shared_ptr<LivenessClient>>(
      m, "LivenessClient", "Connection of one rank to the hub.")
      .def(py::init(&make_client), py::arg("host"), py::arg("port"),
           py::kw_only(), py::arg("secret"), py::arg("global_rank"),
           py::arg("board"), py::arg("connect_timeout_s") = 60.0,
           py::arg("stops") = nullptr, py::arg("stacks_signals") = py::none(),
           py::arg("stacks_fd") = -1, py::arg("hang_after_s") = 0.0,
           py::arg("hang_raises") = false, py::arg("interrupt_signal") = -1,
           py::arg("device") = "cpu")
      .def("request_stop", &LivenessClient::request_stop, release_gil(),
           "Asks all ranks to stop at one boundary.")
      .def("report_raised", &LivenessClient::report_raised, release_gil(),
           py::arg("where"), py::arg("text"),
           "Tells all ranks of an exception of this rank.")
      .def("leave", &LivenessClient::leave, release_gil(),
           "Says goodbye; the end of this process is no fault any more.")
      .def("close", &LivenessClient::close, release_gil());
}

}  // namespace

void bind_health(py::module_& m) {
  bind_fault_board(m);
  bind_handshake(m);
  bind_liveness(m);
}

}  // namespace smp::bindings
