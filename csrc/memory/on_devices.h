#pragma once

#include <c10/core/Device.h>

#include <utility>

#include "csrc/common/accelerator.h"
#include "csrc/common/check.h"
#include "csrc/memory/kernel_stream.h"

// Operators with one implementation for all devices, chosen by their input.

namespace smp::memory {

/// Queues kernels on an accelerator, in the order of the caller's current
/// stream, and raises errors; launch(stream) returns nullptr or an error's
/// text.
template <typename Launch>
void run_on_device(const char* op, c10::Device device, Launch&& launch) {
  const KernelStream stream(device);
  const char* error = std::forward<Launch>(launch)(stream.handle());
  SMP_CHECK(error == nullptr, op, " on ", c10::DeviceTypeName(device.type()),
            ": ", error);
  stream.finish();
}

}  // namespace smp::memory

/// Registers the calls of m.impl() in `body` for tensors of all devices.
#define SMP_IMPL_ON_ALL_DEVICES(m, body)                                \
  TORCH_LIBRARY_IMPL(smp, CPU, m) body TORCH_LIBRARY_IMPL(smp, CUDA, m) \
  body TORCH_LIBRARY_IMPL(smp, Meta, m) body
