#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

// The current device and the current stream belong to a thread: a new thread
// has device 0 and default streams, whatever its maker has. Only generic
// classes of c10 are used: the build may have no CUDA toolkit.

namespace smp::memory {

/// Makes `device` the current one of the calling thread, for good; each thread
/// of ours calls it first. Does nothing on the CPU.
void enter_device(c10::Device device);

/// Returns the stream on which the calling thread would use `device`; none on
/// the CPU.
std::optional<c10::Stream> current_stream(c10::Device device);

/// Makes the calling thread work on the device of a stream, in the order of
/// that stream, and restores the previous device and stream at its end. Does
/// nothing without a stream.
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
