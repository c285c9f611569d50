#pragma once

#include <sys/types.h>

#include <string>

namespace smp::health {

/// Takes native stacks of this process: those of threads that run or wait in
/// the system, and that of the script's thread. Threads that sleep are left
/// out, because their Python stacks show as much.
class NativeStacks {
 public:
  /// Installs a handler of `signal` that writes the stack of the thread it runs
  /// on to `fd`. The handler stays for the life of the process.
  NativeStacks(int signal, int fd);

  /// @param script_thread  number of the script's thread in the system
  /// @return for each thread a line with its name and state, then a line for
  ///         each frame, innermost first. One thread at a time may call it.
  std::string take(pid_t script_thread) const;

 private:
  std::string take_one(pid_t thread) const;

  int signal_;
  int fd_;  ///< file that can be cut and read; not owned
};

/// Returns one line for a line of `backtrace_symbols_fd`: library and function,
/// as in "libtorch_cpu.so: at::mm(...)"; public for tests.
std::string frame_words(const std::string& line);

}  // namespace smp::health
