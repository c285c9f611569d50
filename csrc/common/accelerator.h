#pragma once

namespace smp {

/// Returns whether a `c10::Device` has streams of its own, so that the host
/// only queues work: all but the CPU and meta, which has no data.
template <typename Device>
bool is_accelerator(const Device& device) {
  return !device.is_cpu() && !device.is_meta();
}

}  // namespace smp
