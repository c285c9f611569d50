#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace smp::memory {

/// A point in the work of a stream; on the CPU, where work is done when it was
/// asked for, always over.
class Mark {
 public:
  static Mark none() { return Mark(); }
  static Mark record(const c10::Stream& stream) {
    Mark mark;
    mark.event_.emplace(stream.device_type());
    mark.event_->record(stream);
    return mark;
  }

  /// What is asked of `stream` from now on begins after the mark.
  void block(const c10::Stream& stream) const {
    if (event_) event_->block(stream);
  }
  bool is_over() const { return !event_ || event_->query(); }

 private:
  Mark() = default;
  std::optional<c10::Event> event_;
};

/// Copies of one direction between a device and the host, beside its compute.
/// Only generic classes of c10: there may be no CUDA toolkit where this is
/// compiled.
class CopyStream {
 public:
  explicit CopyStream(c10::Device device) : device_(device) {
    if (device.is_cpu()) return;
    const c10::impl::VirtualGuardImpl impl(device.type());
    stream_ = impl.getStreamFromGlobalPool(device);
  }

  /// Runs `copy` on this stream, after all that was asked of the caller's
  /// stream and after `until`. @return its end
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

  /// The end of what was asked of this stream.
  Mark end() const { return stream_ ? Mark::record(*stream_) : Mark::none(); }

  /// What comes next on the caller's stream waits for `until`.
  void let_caller_wait(const Mark& until) const {
    if (stream_) until.block(callers());
  }
  /// The same for this stream.
  void wait(const Mark& until) const {
    if (stream_) until.block(*stream_);
  }

 private:
  c10::Stream callers() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }

  const c10::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace smp::memory
