#include <c10/core/impl/VirtualGuardImpl.h>

#include "csrc/memory/kernel_stream.h"

namespace smp::memory {

const bool kHasNativeHandles = false;

// Only the default stream has a handle that is known: null.
NativeStream native_stream(const c10::Stream& current) {
  const c10::impl::VirtualGuardImpl impl(current.device_type());
  return {impl.getDefaultStream(current.device()), nullptr};
}

}  // namespace smp::memory
