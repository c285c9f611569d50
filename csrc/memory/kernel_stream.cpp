#include "csrc/memory/kernel_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "csrc/common/torch_releases.h"
#include "csrc/memory/copy_stream.h"

namespace smp::memory {
namespace {

void go_on_after(const c10::Stream& waiting, const c10::Stream& until) {
  if (waiting != until) Mark::record(until).block(waiting);
}

}  // namespace

const bool kHasNativeHandles = kTellsHandle<c10::Stream>;

NativeStream native_stream(const c10::Stream& current) {
  return by_handle(
      current, [&](void* handle) { return NativeStream{current, handle}; },
      [&] {
        // Only the default stream has a known handle: null.
        const c10::impl::VirtualGuardImpl impl(current.device_type());
        return NativeStream{impl.getDefaultStream(current.device()), nullptr};
      });
}

KernelStream::KernelStream(c10::Device device)
    : guard_(device),
      current_(c10::impl::VirtualGuardImpl(device.type()).getStream(device)),
      native_(native_stream(current_)) {
  go_on_after(native_.stream, current_);
}

void KernelStream::finish() const { go_on_after(current_, native_.stream); }

}  // namespace smp::memory
