#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "csrc/mailbox/message.h"
#include "csrc/memory/random_state.h"
#include "csrc/pipeline/caller_state.h"
#include "csrc/schedule/task.h"

namespace smp::pipeline {

using schedule::Phase;
using schedule::TaskKey;

/// One execution that may have to wait in the middle: the step body of a
/// microbatch, or the service of one request. It owns an OS thread while it
/// lives and runs only while it holds the rank's baton (see Scheduler).
/// All members belong to the scheduler's mutex unless said otherwise.
struct Context {
  enum class State { kNotStarted, kReady, kRunning, kSuspended, kDone };

  TaskKey key;
  /// Description for errors: "module 'transformer.h.3', microbatch 1,
  /// backward".
  std::string where;
  /// Seed of the generators at the start, made of (seed, step, mb, call path).
  uint64_t seed = 0;
  std::function<void()> work;

  State state = State::kNotStarted;
  int64_t arrival = 0;
  const char* waits_for = "";  ///< while suspended: for tables of waits
  int waits_for_rank = -1;     ///< global rank; -1 when no answer is awaited
  int64_t waits_since_ns = 0;  ///< see Timeline; 0 while nothing is recorded
  std::condition_variable resumed;
  bool is_helping = false;  ///< may have to be woken through the mailbox
  /// True once it has asked for the data of a gradient. Written by its own
  /// thread while it runs, read by others while it does not run.
  bool awaits_gradients = false;

  /// State of the generators while another context runs.
  std::optional<memory::RandomState> random_state;
  /// Calls that it made. Own thread.
  CallerState caller;
  /// Step bodies: numbers of calls of the model and of backward. Own thread.
  int64_t num_model_calls = 0;
  int64_t num_backward_calls = 0;
};

/// A place where a context waits for one message. It may be filled before a
/// context waits.
struct Slot {
  std::optional<mailbox::Message> message;
  Context* waiter = nullptr;
};

/// Returns a row for tables of waiting contexts.
std::string to_string(const Context& context);
/// Returns what a context that gets the baton now has waited for, and the rank
/// it waited for.
std::pair<const char*, int> reason_of(const Context& context);

/// Returns the context that the calling thread runs, or null.
Context* current_context();
/// Sets the context of the calling thread; called by the scheduler.
void set_current_context(Context* context);
/// Returns the context that the calling thread runs; there must be one.
/// @param what  operation that needs the context, for the error
Context& calling_context(const std::string& what);

/// Makes backward calls of this thread run their nodes on this thread, also
/// those on an accelerator: a node that waits for another rank must not block
/// the one worker thread that autograd has per device.
void keep_backward_on_this_thread();

}  // namespace smp::pipeline
