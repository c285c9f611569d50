#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "csrc/health/native_stacks.h"

namespace smp::health {

/// Takes the stacks of this process, even while one of its threads holds the
/// interpreter's lock. The caller has registered handlers that write to `fd`;
/// Python's faulthandler does so without that lock.
class StackDump {
 public:
  /// Makes the calling thread the one of the script.
  /// @param all_signal  signal whose handler writes the stacks of all threads,
  ///                up to a number; it is run on the thread that calls `take`
  /// @param own_signal  signal whose handler writes the stack of the thread
  ///                    that runs it; it is run on the thread of the script
  /// @param native_signal  signal for NativeStacks; -1: none
  StackDump(int all_signal, int own_signal, int fd, int native_signal = -1);

  /// Returns the stack of the script, the stacks of other threads that run
  /// Python, and the native stacks of threads that run. One thread at a time
  /// may call it.
  std::string take() const;

 private:
  std::string read() const;

  int all_signal_;
  int own_signal_;
  int fd_;  ///< file that can be cut and read; not owned
  pid_t script_thread_;
  std::optional<NativeStacks> native_;
};

/// Joins the two dumps that `take` reads; public for tests.
std::string join_stacks(const std::string& script, const std::string& all);

}  // namespace smp::health
