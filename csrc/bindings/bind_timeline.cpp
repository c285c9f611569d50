#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>

#include "csrc/pipeline/timeline.h"
#include "csrc/schedule/task.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

using pipeline::Timeline;
using pipeline::TimelineEvent;

const char* word(TimelineEvent::Kind kind) {
  switch (kind) {
    case TimelineEvent::Kind::kRun:
      return "run";
    case TimelineEvent::Kind::kWait:
      return "wait";
    case TimelineEvent::Kind::kIdle:
      return "idle";
    case TimelineEvent::Kind::kSent:
      return "sent";
    case TimelineEvent::Kind::kReceived:
      return "received";
    case TimelineEvent::Kind::kStep:
      return "step";
    case TimelineEvent::Kind::kDevice:
      return "device";
    case TimelineEvent::Kind::kLaneSent:
      return "lane sent";
    case TimelineEvent::Kind::kLaneReceived:
      return "lane received";
  }
  return "";
}

// Returns the fields of smp.observe.timeline.events.Event, in its order.
py::tuple to_tuple(const TimelineEvent& event) {
  return py::make_tuple(
      word(event.kind), event.step, static_cast<int64_t>(event.key.phase),
      event.key.mb, event.key.module_id, event.key.visit, event.key.resume,
      event.what, event.peer, event.begin_ns, event.end_ns,
      event.ref.owner_rank, event.ref.id, event.bytes, event.uncertainty_ns);
}

py::tuple take(Timeline& timeline) {
  Timeline::Recording recording;
  {
    py::gil_scoped_release release;  // it may wait for the device
    recording = timeline.take();
  }
  py::list events(recording.events.size());
  for (size_t i = 0; i < recording.events.size(); ++i) {
    events[i] = to_tuple(recording.events[i]);
  }
  return py::make_tuple(std::move(events), recording.num_dropped);
}

}  // namespace

void bind_timeline(py::module_& m) {
  py::class_<Timeline, std::shared_ptr<Timeline>>(
      m, "Timeline", "Records what a rank does; see pipeline/timeline.h.")
      .def(py::init([](const std::string& device) {
             return std::make_shared<Timeline>(c10::Device(device));
           }),
           py::arg("device") = "cpu")
      .def("start", &Timeline::start, py::arg("capacity"),
           "Begins a recording that keeps the youngest events.")
      .def("stop", &Timeline::stop)
      .def("take", &take, "(events, number of older ones that were dropped)")
      .def("discard", &Timeline::discard,
           "Forgets what was recorded, and waits for no device.")
      .def_property_readonly("is_on", &Timeline::is_on)
      .def_static("now_ns", &Timeline::now_ns, "The clock of the events.")
      .def("begin_step", &Timeline::begin_step, py::arg("step"),
           py::arg("num_microbatches"))
      .def("end_step", &Timeline::end_step)
      .def(
          "begin_run",
          [](Timeline& timeline, bool backward, int64_t mb) {
            schedule::TaskKey key;
            key.phase = backward ? schedule::Phase::kBackward
                                 : schedule::Phase::kForward;
            key.mb = mb;
            key.resume = backward ? 1 : 0;
            timeline.begin_run(key, "the body of the step", -1);
          },
          py::arg("backward"), py::arg("mb"),
          "A step body runs; for ranks without a server.")
      .def("end_run", &Timeline::end_run);
}

}  // namespace smp::bindings
