#include "csrc/lanes/device_copies.h"

// Replaces cuda_copies.cpp in builds without the CUDA toolkit.

namespace smp::lanes {

std::unique_ptr<DeviceCopies> make_cuda_copies(c10::Device /*device*/,
                                               std::string& why_not) {
  why_not =
      "this build of smp has no CUDA code; rebuild with nvcc on PATH and "
      "SMP_CUDA=on";
  return nullptr;
}

}  // namespace smp::lanes
