#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

namespace smp::memory {

/// A stream and the handle under which a launcher of kernels knows it (a
/// `cudaStream_t`), which it gets without the headers of a CUDA toolkit: there
/// may be none where this is compiled.
struct NativeStream {
  c10::Stream stream;
  void* handle;
};

/// Whether torch gives the handle of any stream, so that kernels run on the
/// caller's own and a CUDA graph can record them.
extern const bool kHasNativeHandles;
/// `current`, or what kernels have to run on instead of it: where torch gives
/// no handle, the default stream of the device, whose handle is null.
NativeStream native_stream(const c10::Stream& current);

/// Where kernels for `device` are launched, in order with what was asked of the
/// caller's current stream before and is asked of it afterwards. Meanwhile the
/// device is the current one.
class KernelStream {
 public:
  explicit KernelStream(c10::Device device);

  void* handle() const { return native_.handle; }

  /// The caller's stream goes on after the kernels.
  void finish() const;

 private:
  const c10::DeviceGuard guard_;
  const c10::Stream current_;
  const NativeStream native_;
};

}  // namespace smp::memory
