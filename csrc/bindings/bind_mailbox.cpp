#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bytes.h"
#include "csrc/bindings/end_without_gil.h"
#include "csrc/bindings/waits.h"
#include "csrc/comm/communicator.h"
#include "csrc/comm/flight_watch.h"
#include "csrc/comm/peer_sockets.h"
#include "csrc/common/check.h"
#include "csrc/health/fault_board.h"
#include "csrc/lanes/lane_table.h"
#include "csrc/mailbox/link_probe.h"
#include "csrc/mailbox/mailbox.h"
#include "csrc/mailbox/object_exchange.h"
#include "csrc/shm/shared_memory.h"

namespace py = pybind11;

namespace smp::bindings {

using health::FaultBoard;
using mailbox::LinkProbe;
using mailbox::Mailbox;
using mailbox::ObjectExchange;

namespace {

using release_gil = py::call_guard<py::gil_scoped_release>;

// Wraps a Python function that any thread may call and drop.
std::function<comm::CommunicatorPtr(const lanes::CopyChannel&)> channel_factory(
    py::function make_channel) {
  const std::shared_ptr<py::function> kept(
      new py::function(std::move(make_channel)), [](py::function* last) {
        const py::gil_scoped_acquire gil;
        delete last;
      });
  return [kept](const lanes::CopyChannel& channel) {
    const py::gil_scoped_acquire gil;
    try {
      return (*kept)(channel.src, channel.dst, channel.index)
          .cast<comm::CommunicatorPtr>();
    } catch (py::error_already_set& e) {
      throw Error(rank_prefix() + e.what());
    }
  };
}

std::shared_ptr<Mailbox> make_mailbox(
    comm::CommunicatorPtr world, std::shared_ptr<FaultBoard> board,
    const shm::SharedMemoryPtr& shared_memory, const std::string& device,
    const std::string& machine, int pipeline, const std::string& lane,
    int64_t slot_bytes, std::optional<py::function> make_channel,
    comm::FlightWatchPtr flights, const std::string& nccl_host,
    const std::string& launch_blocking, double timeout_s,
    std::shared_ptr<comm::PeerSockets> sockets) {
  lanes::LaneOptions options;
  options.device = c10::Device(device);
  options.mode = lane;
  options.machine = machine;
  options.pipeline = pipeline;
  options.ring.slot_bytes = slot_bytes;
  if (make_channel) {
    options.groups = {.make = channel_factory(*std::move(make_channel)),
                      .flights = std::move(flights)};
  }
  options.nccl_host = nccl_host;
  options.launch_blocking = launch_blocking;
  options.timeout = to_ms(timeout_s);
  py::gil_scoped_release release;
  return end_without_gil(new Mailbox(std::move(world), std::move(board),
                                     shared_memory, std::move(options),
                                     std::move(sockets)));
}

// Returns the lane of each pair, by source and destination.
std::vector<std::tuple<int, int, std::string, std::string>> mailbox_lanes(
    const Mailbox& mailbox) {
  const lanes::LaneChoices choices = mailbox.lanes();
  std::vector<std::tuple<int, int, std::string, std::string>> result;
  for (size_t src = 0; src < choices.size(); ++src) {
    for (size_t dst = 0; dst < choices.size(); ++dst) {
      const lanes::LaneChoice& one = choices[src][dst];
      if (!one.kind) continue;
      result.emplace_back(static_cast<int>(src), static_cast<int>(dst),
                          lanes::name_of(*one.kind), one.reason);
    }
  }
  return result;
}

void add_traffic(py::dict& result, const std::string& prefix,
                 const mailbox::Traffic& traffic) {
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
  result["lane_tensors_sent"] = stats.lanes.tensors_sent;
  result["lane_bytes_sent"] = stats.lanes.bytes_sent;
  result["lane_tensors_received"] = stats.lanes.tensors_received;
  result["lane_times_full"] = stats.lanes.times_full;
  result["lane_times_too_large"] = stats.lanes.times_too_large;
  return result;
}

std::shared_ptr<LinkProbe> make_probe(std::shared_ptr<Mailbox> mailbox,
                                      std::shared_ptr<FaultBoard> board) {
  return end_without_gil(new LinkProbe(std::move(mailbox), std::move(board)));
}

std::vector<std::pair<double, double>> probe_link(LinkProbe& probe, int peer,
                                                  int64_t num_bytes,
                                                  int64_t repeats,
                                                  double timeout_s,
                                                  const std::string& device) {
  std::vector<std::pair<double, double>> result;
  for (const LinkProbe::Sample& sample : probe.measure(
           peer, num_bytes, repeats, to_ms(timeout_s), c10::Device(device))) {
    result.emplace_back(static_cast<double>(sample.one_way_ns) * 1e-9,
                        static_cast<double>(sample.round_trip_ns) * 1e-9);
  }
  return result;
}

std::shared_ptr<ObjectExchange> make_exchange(std::shared_ptr<Mailbox> mailbox,
                                              std::shared_ptr<FaultBoard> board,
                                              double timeout_s) {
  return end_without_gil(new ObjectExchange(
      std::move(mailbox), std::move(board), to_ms(timeout_s)));
}

py::typing::Tuple<py::bytes, py::typing::List<at::Tensor>> recv(
    ObjectExchange& exchange, int src) {
  mailbox::Object object;
  {
    py::gil_scoped_release release;
    object = exchange.recv(src);
  }
  return py::make_tuple(py::bytes(object.bytes), object.tensors);
}

py::typing::List<py::bytes> all_gather(ObjectExchange& exchange,
                                       const std::vector<int>& ranks,
                                       Bytes data, const std::string& what) {
  std::vector<std::string> gathered;
  {
    py::gil_scoped_release release;
    gathered = exchange.all_gather(ranks, data.copy(), what);
  }
  py::typing::List<py::bytes> result;
  for (const std::string& one : gathered) result.append(py::bytes(one));
  return result;
}

void bind_messages(py::module_& m) {
  py::class_<Mailbox, std::shared_ptr<Mailbox>>(
      m, "Mailbox", "Messages of all channels between all ranks.")
      .def(py::init(&make_mailbox), py::arg("world"), py::arg("board"),
           py::arg("shared_memory") = nullptr, py::arg("device") = "cpu",
           py::kw_only(), py::arg("machine") = "", py::arg("pipeline") = 0,
           py::arg("lane") = "auto",
           py::arg("slot_bytes") = lanes::RingOptions{}.slot_bytes,
           py::arg("make_channel") = py::none(), py::arg("flights") = nullptr,
           py::arg("nccl_host") = "", py::arg("launch_blocking") = "",
           py::arg("timeout_s") = 1800.0, py::arg("sockets") = nullptr)
      .def("stats", &mailbox_stats)
      .def("lanes", &mailbox_lanes,
           "(source, destination, lane, why) of each pair of ranks that send "
           "each other tensors; empty where these travel in messages.")
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
           py::arg("timeout_s") = 60.0, py::arg("device") = "cpu",
           "(one way, round trip) in seconds of each message; the peer has a "
           "probe too.");
}

}  // namespace

void bind_mailbox(py::module_& m) {
  bind_messages(m);

  py::class_<ObjectExchange, std::shared_ptr<ObjectExchange>>(
      m, "ObjectExchange", "Objects between ranks; every call blocks.")
      .def(py::init(&make_exchange), py::arg("mailbox"), py::arg("board"),
           py::arg("timeout_s") = 1800.0)
      .def(
          "set_timeout",
          [](ObjectExchange& exchange, double timeout_s) {
            exchange.set_timeout(to_ms(timeout_s));
          },
          py::arg("timeout_s"), release_gil())
      .def(
          "send",
          [](ObjectExchange& exchange, int dst, Bytes data,
             std::vector<at::Tensor> tensors) {
            exchange.send(dst, {data.copy(), std::move(tensors)});
          },
          release_gil(), py::arg("dst"), py::arg("data"),
          py::arg("tensors") = std::vector<at::Tensor>(),
          "Returns when dst has called recv. Tensors are on the CPU.")
      .def("recv", &recv, py::arg("src"),
           "The bytes and tensors that src has sent or broadcast next.")
      .def(
          "broadcast",
          [](ObjectExchange& exchange, const std::vector<int>& ranks,
             Bytes data, std::vector<at::Tensor> tensors) {
            exchange.broadcast(ranks, {data.copy(), std::move(tensors)});
          },
          release_gil(), py::arg("ranks"), py::arg("data"),
          py::arg("tensors") = std::vector<at::Tensor>(),
          "By the sender only; returns when all others have called recv.")
      .def("all_gather", &all_gather, py::arg("ranks"), py::arg("data"),
           py::arg("what") = "all_gather",
           "Collective: the bytes of all, in the order of ranks.")
      .def("barrier", &ObjectExchange::barrier, release_gil(), py::arg("ranks"),
           py::arg("what") = "barrier", "Collective.");
}

}  // namespace smp::bindings
