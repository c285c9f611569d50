#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <utility>

#include "csrc/memory/device_meter.h"
#include "csrc/memory/device_scope.h"
#include "csrc/pipeline/context_generators.h"

namespace smp::pipeline {

/// The device of a rank as contexts use it: on which stream, with which random
/// numbers, and what is marked there at the end of their turns. Belongs to the
/// scheduler's mutex, but for `end_turn`.
class StepDevice {
 public:
  /// @param meter  gets a mark at the end of each turn; may be null
  StepDevice(c10::Device device, std::shared_ptr<memory::DeviceMeter> meter)
      : device_(device), meter_(std::move(meter)), generators_(device) {}

  /// Contexts work in the order of the stream that is the caller's current one
  /// now.
  void begin_step() { stream_ = memory::current_stream(device_); }
  /// None on the CPU, and before the first step.
  const std::optional<c10::Stream>& stream() const { return stream_; }
  ContextGenerators& generators() { return generators_; }
  /// In the thread of the context whose turn ends, without the mutex.
  void end_turn() const {
    if (meter_) meter_->mark();
  }

 private:
  const c10::Device device_;
  const std::shared_ptr<memory::DeviceMeter> meter_;
  std::optional<c10::Stream> stream_;  // of the step that began last
  ContextGenerators generators_;
};

}  // namespace smp::pipeline
