#pragma once

#include <c10/core/Device.h>

#include "csrc/pipeline/context.h"

namespace smp::pipeline {

/// Random generators of this rank, which change hands with the baton, so that
/// what a context draws does not depend on which contexts ran between. Belongs
/// to the scheduler's mutex: a cancelled context may end while another one is
/// here.
class ContextGenerators {
 public:
  explicit ContextGenerators(c10::Device device) : device_(device) {}
  /// The generators are this context's from now on.
  void give_to(Context& context);
  void forget(const Context& context);

 private:
  const c10::Device device_;
  Context* owner_ = nullptr;
};

}  // namespace smp::pipeline
