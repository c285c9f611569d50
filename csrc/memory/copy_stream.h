#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "csrc/memory/device_scope.h"
#include "csrc/memory/mark.h"

namespace smp::memory {

/// Makes copies of one direction between a device and the host, beside its
/// compute. Uses only generic classes of c10: the build may have no CUDA
/// toolkit.
class CopyStream {
 public:
  explicit CopyStream(c10::Device device) : device_(device) {
    if (device.is_cpu()) return;
    const c10::impl::VirtualGuardImpl impl(device.type());
    stream_ = impl.getStreamFromGlobalPool(device);
  }

  /// Runs `copy` on this stream, after the earlier work of the caller's stream
  /// and after `until`. @return its end
  template <typename Copy>
  Mark run(const Mark& until, const Copy& copy) {
    if (!stream_) {
      copy();
      return Mark::none();
    }
    Mark::record(callers()).block(*stream_);
    until.block(*stream_);
    const c10::StreamGuard guard(*stream_);
    copy();
    return Mark::record(*stream_);
  }

  /// Runs `copy` without waiting for the caller's stream. @return its end
  template <typename Copy>
  Mark run_alone(const Copy& copy) {
    const c10::OptionalStreamGuard guard(stream_);
    copy();
    return end();
  }

  /// Keeps the memory of `tensor` from reuse until this stream is done with it.
  void keep(const at::Tensor& tensor) const {
    if (!stream_) return;
    c10::impl::VirtualGuardImpl(device_.type())
        .recordDataPtrOnStream(tensor.storage().data_ptr(), *stream_);
  }

  /// Returns the end of this stream's work so far.
  Mark end() const { return stream_ ? Mark::record(*stream_) : Mark::none(); }

  /// Makes later work on the caller's stream wait for `until`.
  void let_caller_wait(const Mark& until) const {
    if (stream_) until.block(callers());
  }
  /// Makes later work on this stream wait for `until`.
  void wait(const Mark& until) const {
    if (stream_) until.block(*stream_);
  }

 private:
  c10::Stream callers() const { return *current_stream(device_); }

  const c10::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace smp::memory
