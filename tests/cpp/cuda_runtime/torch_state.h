#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include "tests/cpp/cuda_runtime/fake_cuda.h"

// Functions that the files of the devices of PyTorch share.

namespace smp::fake_cuda {

inline constexpr auto kTorchType = c10::DeviceType::PrivateUse1;

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  TORCH_CHECK(false, "CUDA error: ", cudaGetErrorString(status));
}

// c10::cuda::GetDevice and its kin: a thread keeps a device that it is to
// return to apart, while that has no context.
c10::DeviceIndex torch_get_device();
void torch_set_device(c10::DeviceIndex device);
c10::DeviceIndex torch_exchange_device(c10::DeviceIndex device);
void torch_maybe_set_device(c10::DeviceIndex device);

cudaStream_t native_of(const c10::Stream& stream);
c10::Stream torch_current_stream(c10::DeviceIndex device);
c10::Stream torch_new_stream(c10::DeviceIndex device);
c10::Stream torch_exchange_stream(const c10::Stream& stream);

void record_stream(const c10::DataPtr& data, const c10::Stream& stream);
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

}  // namespace smp::fake_cuda
