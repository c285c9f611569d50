#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

#include "csrc/memory/device_scope.h"
#include "csrc/pipeline/context_generators.h"

namespace smp::pipeline {

/// The device of a rank as contexts use it: its stream and its random
/// generators. Guarded by the scheduler's mutex.
class StepDevice {
 public:
  explicit StepDevice(c10::Device device)
      : device_(device), generators_(device) {}

  /// Begins a step: contexts work in the order of the caller's current stream.
  void begin_step() { stream_ = memory::current_stream(device_); }
  /// Returns the stream; no stream on the CPU, and before the first step.
  const std::optional<c10::Stream>& stream() const { return stream_; }
  ContextGenerators& generators() { return generators_; }

 private:
  const c10::Device device_;
  std::optional<c10::Stream> stream_;  // of the step that began last
  ContextGenerators generators_;
};

}  // namespace smp::pipeline
