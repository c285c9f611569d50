#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

// Devices of PyTorch (PrivateUse1) over the stand-in for CUDA: a guard with the
// calls of c10's CUDAGuardImpl, an allocator that reuses memory in the order of
// streams, page-locked memory, copies. Other operators wait for the device and
// run on the CPU.

namespace smp::fake_cuda {

c10::Device torch_device(int index);

/// Returns the bytes of tensors that are alive; memory that is kept for later
/// tensors does not count.
int64_t bytes_of_tensors();
/// Frees memory that is kept for later tensors.
void empty_cache();

}  // namespace smp::fake_cuda
