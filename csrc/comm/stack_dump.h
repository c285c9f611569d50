#pragma once

#include <string>

namespace smp::comm {

/// The Python stacks of all threads of this process, also while one of them
/// keeps the interpreter for itself. Somebody has registered a handler for
/// `signal_number` that writes them to `fd` (Python's faulthandler does so
/// without the interpreter's lock); it is run on the calling thread.
class StackDump {
 public:
  StackDump(int signal_number, int fd)
      : signal_number_(signal_number), fd_(fd) {}

  /// One thread at a time.
  std::string take() const;

 private:
  int signal_number_;
  int fd_;  ///< of a file that can be cut and read again; not ours
};

}  // namespace smp::comm
