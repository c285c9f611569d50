#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

// Where a thread works. The current device and the current stream belong to the
// thread: a new thread has device 0 and default streams, whatever the thread
// that made it has. Only generic classes of c10: there may be no CUDA toolkit
// where this is compiled.

namespace smp::memory {

/// Makes `device` the current one of the calling thread, for good: what a
/// thread of ours does first. Nothing on the CPU.
void enter_device(c10::Device device);

/// The stream on which the calling thread would use `device`; none on the CPU.
std::optional<c10::Stream> current_stream(c10::Device device);

/// Until its end the calling thread works on the device of a stream, in the
/// order of that stream; then on what it had before. Nothing without a stream.
class DeviceScope {
 public:
  explicit DeviceScope(const std::optional<c10::Stream>& stream) {
    if (stream) guard_.emplace(*stream);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace smp::memory
