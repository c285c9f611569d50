#pragma once

#include <c10/core/Device.h>

#include "csrc/pipeline/context.h"

namespace smp::pipeline {

/// Hands the random generators of this rank on with the baton, so that the
/// numbers a context draws do not depend on which contexts ran between. Guarded
/// by the scheduler's mutex: a cancelled context may end while another one is
/// in here.
class ContextGenerators {
 public:
  explicit ContextGenerators(c10::Device device) : device_(device) {}
  /// Gives the generators to this context.
  void give_to(Context& context);
  void forget(const Context& context);

 private:
  const c10::Device device_;
  Context* owner_ = nullptr;
};

}  // namespace smp::pipeline
