#include "csrc/pipeline/context.h"

#include <c10/core/AutogradState.h>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

thread_local Context* context_of_thread = nullptr;

}  // namespace

Context* current_context() { return context_of_thread; }

void set_current_context(Context* context) { context_of_thread = context; }

Context& calling_context(const std::string& what) {
  SMP_CHECK(context_of_thread, what,
            " is possible inside a function decorated with @smp.step only");
  return *context_of_thread;
}

void keep_backward_on_this_thread() {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

}  // namespace smp::pipeline
