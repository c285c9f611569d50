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

/// Memory of a device. What another process has made is unmapped with the last
/// copy of the pointer.
using DeviceMemory = std::shared_ptr<uint8_t>;

/// A stream of this rank that copies. Calls ask for work and return. One thread
/// at a time.
class CopyQueue {
 public:
  virtual ~CopyQueue() = default;

  /// What follows begins after all that was asked of the current stream of the
  /// calling thread.
  virtual void follow_caller() = 0;
  /// What follows begins after the last `record` of the event that any process
  /// has asked for so far; at once if there is none.
  virtual void wait(const SharedEvent& event) = 0;
  virtual void copy(uint8_t* to, const uint8_t* from, int64_t num_bytes) = 0;
  virtual void record(SharedEvent& event) = 0;

  /// A tensor on this rank's device for what the queue writes next.
  virtual at::Tensor new_tensor(at::IntArrayRef sizes,
                                at::ScalarType dtype) = 0;
  /// Its memory goes to nobody else before the work so far is over.
  virtual void keep(const at::Tensor& tensor) = 0;
  /// The end of the work so far.
  virtual memory::Mark end() = 0;
};

/// What a lane asks of a device to share memory with other processes of the
/// host: all calls of IpcLane into the CUDA runtime, or what stands for them in
/// tests. Handles are byte strings that another process opens; a rank does not
/// open its own.
/// All methods throw Error when the device refuses.
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;

  /// Names the device, equal in all processes of the host.
  virtual std::string device_name() const = 0;
  /// Names of devices whose memory this rank's device can read, its own too.
  virtual std::vector<std::string> reachable() const = 0;

  virtual DeviceMemory allocate(int64_t num_bytes) = 0;
  virtual std::string handle_of(const DeviceMemory& memory) = 0;
  virtual DeviceMemory open_memory(const std::string& handle) = 0;
  virtual SharedEventPtr new_event() = 0;
  virtual std::string handle_of(const SharedEvent& event) = 0;
  virtual SharedEventPtr open_event(const std::string& handle) = 0;

  /// Bytes to and from a device while the host waits: for tries.
  virtual void put(uint8_t* to, const std::string& bytes) = 0;
  virtual std::string get(const uint8_t* from, int64_t num_bytes) = 0;

  virtual CopyQueue& outgoing() = 0;
  virtual CopyQueue& incoming() = 0;
  /// Nothing is asked any more; what is in flight need not end.
  virtual void stop() = 0;
};

/// Those of a CUDA device. Never ran on one.
/// @return null where this build cannot, with the reason in `why_not`
std::unique_ptr<DeviceCopies> make_cuda_copies(c10::Device device,
                                               std::string& why_not);

}  // namespace smp::lanes
