#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace smp::late {

/// Returns a generator of the device. Its numbers are those of a CPU generator
/// with the same seed.
at::Generator new_generator(c10::DeviceIndex index);
const at::Generator& default_generator(c10::DeviceIndex index);

/// Returns a CPU generator in the state of a device's one.
at::Generator on_cpu(const at::Generator& generator);
/// Stores the state of `from` in `to`, which may be of another device.
void store_state(const at::Generator& from, at::Generator to);

/// Puts the state of a device's generator into the default one of the CPU while
/// it lives, for operators that have no argument for a generator.
class AsDefaultOfCpu {
 public:
  explicit AsDefaultOfCpu(c10::DeviceIndex index);
  ~AsDefaultOfCpu();
  AsDefaultOfCpu(const AsDefaultOfCpu&) = delete;
  AsDefaultOfCpu& operator=(const AsDefaultOfCpu&) = delete;

 private:
  const at::Generator& ours_;
  const at::Generator before_;  // state of the CPU's
};

}  // namespace smp::late
