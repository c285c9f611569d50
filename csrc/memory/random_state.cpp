#include "csrc/memory/random_state.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <mutex>

namespace smp::memory {
namespace {

at::Generator generator_of(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

at::Tensor state_of(c10::Device device) {
  at::Generator generator = generator_of(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state_of(c10::Device device, const at::Tensor& state) {
  at::Generator generator = generator_of(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

void seed(c10::Device device, uint64_t value) {
  at::Generator generator = generator_of(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(value);
}

}  // namespace

RandomState RandomState::capture(c10::Device device) {
  RandomState state;
  state.device_ = device;
  state.cpu_ = state_of(c10::Device(c10::DeviceType::CPU));
  if (!device.is_cpu()) state.accelerator_ = state_of(device);
  return state;
}

void RandomState::restore() const {
  set_state_of(c10::Device(c10::DeviceType::CPU), cpu_);
  if (!device_.is_cpu()) set_state_of(device_, accelerator_);
}

void seed_generators(uint64_t value, c10::Device device) {
  seed(c10::Device(c10::DeviceType::CPU), value);
  if (!device.is_cpu()) seed(device, value);
}

uint64_t mix_seed(uint64_t seed, uint64_t value) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ULL * (value + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace smp::memory
