#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace smp::memory {

/// A copy of the default random generators of this process: the CPU's and, on
/// an accelerator, the device's. Contexts that take turns on a rank each keep
/// one, so that the order of turns does not change the numbers of a context.
class RandomState {
 public:
  /// Copies the state of the default generators of the CPU and of `device`.
  static RandomState capture(c10::Device device);

  /// Writes the copy back into the default generators.
  void restore() const;

 private:
  c10::Device device_{c10::DeviceType::CPU};
  at::Tensor cpu_;
  at::Tensor accelerator_;
};

/// Seeds the default generators of the CPU and of `device`.
void seed_generators(uint64_t seed, c10::Device device);

/// Mixes `value` into `seed` so that neighbouring values give unrelated seeds.
/// Source: the splitmix64 finaliser (public domain, S. Vigna).
uint64_t mix_seed(uint64_t seed, uint64_t value);

}  // namespace smp::memory
