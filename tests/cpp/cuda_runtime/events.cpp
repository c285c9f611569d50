#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "tests/cpp/cuda_runtime/process.h"

// Events, also those between processes.

struct CUevent_st {};  // its address is the handle

namespace smp::fake_cuda {
namespace {

struct EventHandle {
  uint64_t kind = 0x65766e74;
  int owner = 0;
  int number = 0;
};

cudaEvent_t add_locked(Process& own, Event event) {
  auto* const handle = new CUevent_st;
  own.events[handle] = std::make_shared<Event>(std::move(event));
  return handle;
}

std::shared_ptr<Records> records_of(SharedRecords& event) {
  return {&event.records, [](Records*) {}};
}

EventPtr find_event(cudaEvent_t event) {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  const auto found = own.events.find(event);
  return found == own.events.end() ? nullptr : found->second;
}

void check_alive(const Event& event, const char* call) {
  if (event.is_opened && event.between_processes->is_destroyed) {
    note_violation(std::string(call) +
                   " of an event that its process has destroyed");
  }
}

// A record while another stream's last one is not over: which of them a wait
// means cannot be said.
void check_order(const Event& event, cudaStream_t stream) {
  const uint64_t num_asked = event.records->num_asked;
  if (event.records->num_over >= num_asked) return;
  if (event.last_stream == stream && event.last_record == num_asked) return;
  note_violation(
      "an event is recorded while another stream's record of it "
      "is not over");
}

}  // namespace
}  // namespace smp::fake_cuda

using smp::fake_cuda::Event;
using smp::fake_cuda::EventHandle;
using smp::fake_cuda::EventPtr;
using smp::fake_cuda::fail;
using smp::fake_cuda::find_event;
using smp::fake_cuda::find_stream;
using smp::fake_cuda::process;
using smp::fake_cuda::Records;
using smp::fake_cuda::shared;
using smp::fake_cuda::SharedRecords;
using smp::fake_cuda::SharedState;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  FAKE_CUDA_CALL("cudaEventCreateWithFlags");
  Event made{.device = smp::fake_cuda::current_device(), .flags = flags};
  if ((flags & cudaEventInterprocess) != 0) {
    if ((flags & cudaEventDisableTiming) == 0) {
      return fail(cudaErrorInvalidValue);
    }
    const int number = shared().next_event++;
    if (number >= SharedState::kMaxEvents) {
      return fail(cudaErrorMemoryAllocation);
    }
    made.between_processes = &shared().events[number];
    made.between_processes->owner = process().pid;
    made.records = smp::fake_cuda::records_of(*made.between_processes);
  } else {
    made.records = std::make_shared<Records>();
  }
  const std::lock_guard lock(process().mutex);
  *event = smp::fake_cuda::add_locked(process(), std::move(made));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t status = smp::fake_cuda::enter("cudaEventDestroy");
  const std::lock_guard lock(process().mutex);
  const auto found = process().events.find(event);
  if (found == process().events.end()) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  const Event& gone = *found->second;
  if (gone.is_opened) {
    process().opened_events.erase(
        static_cast<int>(gone.between_processes - shared().events.data()));
  } else if (gone.between_processes != nullptr) {
    gone.between_processes->is_destroyed = true;
  }
  process().events.erase(found);
  delete event;
  return status;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  FAKE_CUDA_CALL("cudaEventRecord");
  const EventPtr found = find_event(event);
  CUstream_st* const on = find_stream(stream);
  if (!found || on == nullptr || on->device != found->device) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  smp::fake_cuda::check_alive(*found, "cudaEventRecord");
  smp::fake_cuda::check_order(*found, on);
  const uint64_t number = ++found->records->num_asked;
  found->last_stream = on;
  found->last_record = number;
  on->add([records = found->records, number] {
    if (records->num_over < number) records->num_over = number;
  });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned flags) {
  FAKE_CUDA_CALL("cudaStreamWaitEvent");
  const EventPtr found = find_event(event);
  CUstream_st* const waiting = find_stream(stream);
  if (!found || waiting == nullptr) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  if (flags != 0) return fail(cudaErrorInvalidValue);
  smp::fake_cuda::check_alive(*found, "cudaStreamWaitEvent");
  waiting->add_wait(found->records, found->records->num_asked);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  FAKE_CUDA_CALL("cudaEventQuery");
  const EventPtr found = find_event(event);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  smp::fake_cuda::check_alive(*found, "cudaEventQuery");
  const Records& records = *found->records;
  return records.num_over >= records.num_asked ? cudaSuccess
                                               : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  FAKE_CUDA_CALL("cudaEventSynchronize");
  const EventPtr found = find_event(event);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  smp::fake_cuda::check_alive(*found, "cudaEventSynchronize");
  const uint64_t goal = found->records->num_asked;
  while (found->records->num_over < goal) {
    if (const cudaError_t status = smp::fake_cuda::failure(); status) {
      return status;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return cudaSuccess;
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle,
                                  cudaEvent_t event) {
  FAKE_CUDA_CALL("cudaIpcGetEventHandle");
  const EventPtr found = find_event(event);
  if (!found || found->between_processes == nullptr || found->is_opened) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  const EventHandle made{.owner = process().pid,
                         .number = static_cast<int>(found->between_processes -
                                                    shared().events.data())};
  *handle = {};
  std::memcpy(handle, &made, sizeof(made));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event,
                                   cudaIpcEventHandle_t handle) {
  FAKE_CUDA_CALL("cudaIpcOpenEventHandle");
  EventHandle asked;
  std::memcpy(static_cast<void*>(&asked), &handle, sizeof(asked));
  if (asked.kind != EventHandle{}.kind) return fail(cudaErrorInvalidValue);
  if (asked.owner == process().pid) return fail(cudaErrorDeviceUninitialized);
  SharedRecords& opened = shared().events.at(asked.number);
  if (opened.is_destroyed) return fail(cudaErrorMapBufferObjectFailed);
  const std::lock_guard lock(process().mutex);
  if (!process().opened_events.insert(asked.number).second) {
    return fail(cudaErrorAlreadyMapped);
  }
  *event = smp::fake_cuda::add_locked(
      process(), {.device = smp::fake_cuda::current_device(),
                  .flags = cudaEventInterprocess | cudaEventDisableTiming,
                  .records = smp::fake_cuda::records_of(opened),
                  .between_processes = &opened,
                  .is_opened = true});
  return cudaSuccess;
}
