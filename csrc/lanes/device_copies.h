#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/memory/mark.h"

namespace smp::lanes {

/// A point in the work of a stream that processes of one host can see.
class SharedEvent {
 public:
  virtual ~SharedEvent() = default;
};
using SharedEventPtr = std::shared_ptr<SharedEvent>;

/// Memory of a device. Memory of another process is unmapped with the last copy
/// of the pointer.
using DeviceMemory = std::shared_ptr<uint8_t>;

/// A stream of this rank that copies. Calls enqueue work and return. One thread
/// at a time may call.
class CopyQueue {
 public:
  virtual ~CopyQueue() = default;

  /// Makes later work begin after all work that the calling thread's current
  /// stream has now.
  virtual void follow_caller() = 0;
  /// Makes later work begin after the last `record` of the event that any
  /// process has enqueued so far; at once if there is none.
  virtual void wait(const SharedEvent& event) = 0;
  virtual void copy(uint8_t* to, const uint8_t* from, int64_t num_bytes) = 0;
  virtual void record(SharedEvent& event) = 0;

  /// Returns a tensor on this rank's device for the queue's next writes.
  virtual at::Tensor new_tensor(at::IntArrayRef sizes,
                                at::ScalarType dtype) = 0;
  /// Keeps the tensor's memory from reuse until the work so far is over.
  virtual void keep(const at::Tensor& tensor) = 0;
  /// Returns the end of the work so far.
  virtual memory::Mark end() = 0;
};

/// The device calls with which a lane shares memory with other processes of the
/// host: all calls of IpcLane into the CUDA runtime, or a substitute in tests.
/// Handles are byte strings that another process opens; a rank does not open
/// its own. All methods throw Error when the device refuses.
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;

  /// Returns the name of the device, equal in all processes of the host.
  virtual std::string device_name() const = 0;
  /// Returns the names of devices whose memory this rank's device can read, its
  /// own included.
  virtual std::vector<std::string> reachable() const = 0;

  virtual DeviceMemory allocate(int64_t num_bytes) = 0;
  virtual std::string handle_of(const DeviceMemory& memory) = 0;
  virtual DeviceMemory open_memory(const std::string& handle) = 0;
  virtual SharedEventPtr new_event() = 0;
  virtual std::string handle_of(const SharedEvent& event) = 0;
  virtual SharedEventPtr open_event(const std::string& handle) = 0;

  /// Copies bytes to a device while the host waits; for tests of the mapping.
  virtual void put(uint8_t* to, const std::string& bytes) = 0;
  virtual std::string get(const uint8_t* from, int64_t num_bytes) = 0;

  virtual CopyQueue& outgoing() = 0;
  virtual CopyQueue& incoming() = 0;
  /// Stops new work; work in flight need not end. Throws nothing.
  virtual void stop() = 0;
};

/// Makes the copies of a CUDA device. Has never run on a device.
/// @return null if this build has no CUDA, with the reason in `why_not`
std::unique_ptr<DeviceCopies> make_cuda_copies(c10::Device device,
                                               std::string& why_not);

}  // namespace smp::lanes
