#include "csrc/memory/device_scope.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace smp::memory {

void enter_device(c10::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace smp::memory
