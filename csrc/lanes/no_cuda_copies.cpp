#include "csrc/lanes/device_copies.h"

// Stands in for cuda_copies.cpp where there is no CUDA toolkit.

namespace smp::lanes {

std::unique_ptr<DeviceCopies> make_cuda_copies(c10::Device /*device*/,
                                               std::string& why_not) {
  why_not =
      "this build of smp has no CUDA code; rebuild with nvcc on PATH and "
      "SMP_CUDA=on";
  return nullptr;
}

}  // namespace smp::lanes
