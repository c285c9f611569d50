#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "csrc/health/native_stacks.h"

namespace smp::health {

/// The stacks of this process, also while one of its threads keeps the
/// interpreter for itself. Somebody has registered handlers that write to `fd`
/// (Python's faulthandler does so without the interpreter's lock).
class StackDump {
 public:
  /// The thread that makes the object is the one that runs the script.
  /// @param all_signal  its handler writes the stacks of all threads, up to a
  ///                    number; it is run on the thread that calls `take`
  /// @param own_signal  its handler writes the stack of the thread that runs
  ///                    it; it is run on the thread of the script
  /// @param native_signal  for NativeStacks; -1: none
  StackDump(int all_signal, int own_signal, int fd, int native_signal = -1);

  /// The stack of the script, those of threads that run Python besides, and
  /// what threads that run do below Python. One thread at a time.
  std::string take() const;

 private:
  std::string read() const;

  int all_signal_;
  int own_signal_;
  int fd_;  ///< of a file that can be cut and read again; not ours
  pid_t script_thread_;
  std::optional<NativeStacks> native_;
};

/// What `take` makes of the two dumps; for tests.
std::string join_stacks(const std::string& script, const std::string& all);

}  // namespace smp::health
