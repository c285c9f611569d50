#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace smp::memory {

/// Runs kernels on the device's default stream, in order with what is queued on
/// the caller's stream. The default stream is the one whose native handle is
/// known (null) without the headers of a CUDA toolkit, which may be absent
/// where this file is compiled.
class DefaultStream {
 public:
  explicit DefaultStream(c10::Device device)
      : guard_(device),
        impl_(device.type()),
        caller_(impl_.getStream(device)),
        default_(impl_.getDefaultStream(device)) {
    wait(default_, caller_);
  }

  void* native() const { return nullptr; }

  /// The caller's stream goes on after the kernels.
  void finish() { wait(caller_, default_); }

 private:
  static void wait(const c10::Stream& waiting, const c10::Stream& until) {
    if (waiting == until) return;
    c10::Event event(until.device_type());
    event.record(until);
    event.block(waiting);
  }

  c10::DeviceGuard guard_;
  c10::impl::VirtualGuardImpl impl_;
  c10::Stream caller_;
  c10::Stream default_;
};

}  // namespace smp::memory
