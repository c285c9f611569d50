#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

namespace smp::memory {

/// A stream and its handle for launchers of kernels (a `cudaStream_t`). The
/// handle needs no headers of a CUDA toolkit, which the build may lack.
struct NativeStream {
  c10::Stream stream;
  void* handle;
};

/// Set if torch gives the handle of any stream, so that kernels run on the
/// caller's own and a CUDA graph can record them.
extern const bool kHasNativeHandles;
/// Returns `current`, or the default stream of the device, whose handle is
/// null, if torch gives no handles.
NativeStream native_stream(const c10::Stream& current);

/// The stream for launches of kernels on `device`, in order with earlier and
/// later work of the caller's current stream. Makes the device the current one
/// meanwhile.
class KernelStream {
 public:
  explicit KernelStream(c10::Device device);

  void* handle() const { return native_.handle; }

  /// Makes the caller's stream go on after the kernels.
  void finish() const;

 private:
  const c10::DeviceGuard guard_;
  const c10::Stream current_;
  const NativeStream native_;
};

}  // namespace smp::memory
