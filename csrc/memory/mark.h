#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace smp::memory {

/// A point in the work of a stream; copies of a mark are the same point. On the
/// CPU, where work is done when it was asked for, marks are empty and always
/// over.
class Mark {
 public:
  /// What a mark is made of.
  class Event {
   public:
    virtual ~Event() = default;
    /// What is asked of `stream` from now on begins after the event.
    /// @throws PeerFailure when the event will not come any more
    virtual void block(const c10::Stream& stream) const = 0;
    virtual bool is_over() const = 0;
    /// When the host ended it (`monotonic_ns`); 0: not yet, or it was no host.
    virtual int64_t over_ns() const { return 0; }
  };

  Mark() = default;
  explicit Mark(std::shared_ptr<const Event> event)
      : event_(std::move(event)) {}

  static Mark none() { return {}; }
  /// The end of what was asked of `stream` so far.
  static Mark record(const c10::Stream& stream);

  /// Whether there is anything to wait for.
  explicit operator bool() const { return event_ != nullptr; }
  void block(const c10::Stream& stream) const {
    if (event_) event_->block(stream);
  }
  bool is_over() const { return !event_ || event_->is_over(); }
  int64_t over_ns() const { return event_ ? event_->over_ns() : 0; }

 private:
  std::shared_ptr<const Event> event_;
};

/// Data that a stream is still making. No thread of the host waits for them;
/// who reads them lets its own stream wait.
struct MarkedTensor {
  at::Tensor data = {};
  Mark mark = {};
  /// On which this rank has made the data; none for what came from elsewhere,
  /// and on the CPU.
  std::optional<c10::Stream> stream = {};

  /// What the current stream of this thread makes.
  static MarkedTensor of_current_stream(at::Tensor data);
  /// The data for the current stream of this thread, which waits for them.
  /// @throws PeerFailure when they will not come any more
  at::Tensor use() &&;
};

}  // namespace smp::memory
