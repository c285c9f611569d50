#include "csrc/pipeline/step_device.h"

#include "csrc/memory/random_state.h"

namespace smp::pipeline {

void StepDevice::give_generators_to(Context& context) {
  if (owner_ == &context) return;
  if (owner_) owner_->random_state = memory::RandomState::capture(device_);
  if (context.random_state) {
    context.random_state->restore();
    context.random_state.reset();
  } else {
    memory::seed_generators(context.seed, device_);
  }
  owner_ = &context;
}

void StepDevice::forget(const Context& context) {
  if (owner_ == &context) owner_ = nullptr;
}

}  // namespace smp::pipeline
