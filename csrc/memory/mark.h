#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace smp::memory {

/// A point in the work of a stream; copies of a mark are the same point. On the
/// CPU, where work is done at once, marks are empty and always over.
class Mark {
 public:
  /// The point behind a mark.
  class Event {
   public:
    virtual ~Event() = default;
    /// Makes later work on `stream` begin after the event.
    /// @throws PeerFailure when the event will not come any more
    virtual void block(const c10::Stream& stream) const = 0;
    virtual bool is_over() const = 0;
    /// Returns when the host ended it (`monotonic_ns`); 0: not yet, or a
    /// device's.
    virtual int64_t over_ns() const { return 0; }
    /// Calls `call` once streams can wait for the event, which may be at once;
    /// never if the event will not come.
    virtual void when_recorded(const std::function<void()>& call) const {
      call();
    }
  };

  Mark() = default;
  explicit Mark(std::shared_ptr<const Event> event)
      : event_(std::move(event)) {}

  static Mark none() { return {}; }
  /// Returns the end of the work of `stream` so far.
  static Mark record(const c10::Stream& stream);

  /// Returns whether there is a point to wait for.
  explicit operator bool() const { return event_ != nullptr; }
  void block(const c10::Stream& stream) const {
    if (event_) event_->block(stream);
  }
  bool is_over() const { return !event_ || event_->is_over(); }
  int64_t over_ns() const { return event_ ? event_->over_ns() : 0; }
  /// See `Event::when_recorded`; an empty mark calls at once.
  void when_recorded(const std::function<void()>& call) const {
    event_ ? event_->when_recorded(call) : call();
  }

 private:
  std::shared_ptr<const Event> event_;
};

/// Data that a stream is still making. No thread of the host waits for them; a
/// reader makes its own stream wait.
struct MarkedTensor {
  at::Tensor data = {};
  Mark mark = {};
  /// Stream on which this rank has made the data; none for data from elsewhere,
  /// and on the CPU.
  std::optional<c10::Stream> stream = {};

  /// Marks data that the current stream of this thread makes.
  static MarkedTensor of_current_stream(at::Tensor data);
  /// Returns the data for the current stream of this thread, which waits for
  /// them.
  /// @throws PeerFailure when they will not come any more
  at::Tensor use() &&;
};

}  // namespace smp::memory
