#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

#include "csrc/memory/device_scope.h"
#include "csrc/pipeline/context.h"

namespace smp::pipeline {

/// The device of a rank as contexts use it: its stream, and its random
/// generators, which go with the baton, so that the numbers a context draws do
/// not depend on which contexts ran between. Guarded by the scheduler's mutex:
/// a cancelled context may end while another one is in here.
class StepDevice {
 public:
  explicit StepDevice(c10::Device device) : device_(device) {}

  /// Begins a step: contexts work in the order of the caller's current stream.
  void begin_step() { stream_ = memory::current_stream(device_); }
  /// Returns the stream; no stream on the CPU, and before the first step.
  const std::optional<c10::Stream>& stream() const { return stream_; }
  void give_generators_to(Context& context);
  void forget(const Context& context);

 private:
  const c10::Device device_;
  std::optional<c10::Stream> stream_;  // of the step that began last
  Context* owner_ = nullptr;           // of the generators
};

}  // namespace smp::pipeline
