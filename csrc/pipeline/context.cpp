#include "csrc/pipeline/context.h"

#include <c10/core/AutogradState.h>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

thread_local Context* context_of_thread = nullptr;

const char* words(Context::State state) {
  switch (state) {
    case Context::State::kNotStarted:
      return "not started";
    case Context::State::kReady:
      return "ready";
    case Context::State::kRunning:
      return "running";
    case Context::State::kSuspended:
      return "waiting for ";
    case Context::State::kDone:
      return "done";
  }
  return "";
}

}  // namespace

std::string to_string(const Context& context) {
  std::string text = context.where + ": " + words(context.state);
  if (context.state != Context::State::kSuspended) return text;
  text += context.waits_for;
  if (context.waits_for_rank >= 0) {
    text += " of global_rank " + std::to_string(context.waits_for_rank);
  }
  return text;
}

std::pair<const char*, int> reason_of(const Context& context) {
  if (context.state != Context::State::kNotStarted) {
    return {context.waits_for, context.waits_for_rank};
  }
  return {context.key.module_id == TaskKey::kStepBody
              ? "a place among the active microbatches"
              : "a request and its tensors",
          -1};
}

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
