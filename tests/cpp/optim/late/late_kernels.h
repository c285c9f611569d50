#pragma once

#include <c10/core/Stream.h>

#include <functional>

// Kernels of smp for the late device: those of the CPU, queued on streams by
// the interface of those of CUDA.

namespace smp::late_kernels {

/// Functions of the device that kernels need (tests/cpp/device/).
struct Device {
  void (*enqueue)(const c10::Stream& stream, std::function<void()> work);
  /// Returns the address at which threads of streams use device memory.
  void* (*touchable)(const void* address);
};

/// Makes smp's operators work on the late device. Call it once, after smp._C
/// is loaded.
void install(const Device& device);

}  // namespace smp::late_kernels
