#pragma once

#include <sys/types.h>

#include <string>

namespace smp::health {

/// The Python stacks of this process, also while one of its threads keeps the
/// interpreter for itself. Somebody has registered handlers that write to `fd`
/// (Python's faulthandler does so without the interpreter's lock).
class StackDump {
 public:
  /// The thread that makes the object is the one that runs the script.
  /// @param all_signal  its handler writes the stacks of all threads, up to a
  ///                    number; it is run on the thread that calls `take`
  /// @param own_signal  its handler writes the stack of the thread that runs
  ///                    it; it is run on the thread of the script
  StackDump(int all_signal, int own_signal, int fd);

  /// The stack of the script, and those of threads that run Python besides.
  /// One thread at a time.
  std::string take() const;

 private:
  std::string read() const;

  int all_signal_;
  int own_signal_;
  int fd_;  ///< of a file that can be cut and read again; not ours
  pid_t script_thread_;
};

/// What `take` makes of the two dumps; for tests.
std::string join_stacks(const std::string& script, const std::string& all);

}  // namespace smp::health
