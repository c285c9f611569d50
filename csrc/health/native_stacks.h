#pragma once

#include <sys/types.h>

#include <string>

namespace smp::health {

/// What threads of this process do below Python: the native stacks of those
/// that run or wait in the system, and of the thread of the script. Stacks of
/// threads that sleep tell nothing that their Python stacks do not.
class NativeStacks {
 public:
  /// Installs a handler of `signal` that writes the stack of the thread that
  /// runs it to `fd`. For the life of the process.
  NativeStacks(int signal, int fd);

  /// @param script_thread  its number for the system
  /// @return for each thread a line with its name and state, then a line for
  ///         each frame, innermost first. One thread at a time.
  std::string take(pid_t script_thread) const;

 private:
  std::string take_one(pid_t thread) const;

  int signal_;
  int fd_;  ///< of a file that can be cut and read again; not ours
};

/// One line for a line of `backtrace_symbols_fd`: library and function, as in
/// "libtorch_cpu.so: at::mm(...)"; for tests.
std::string frame_words(const std::string& line);

}  // namespace smp::health
