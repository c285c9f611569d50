#include "csrc/comm/stack_dump.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <array>

namespace smp::comm {

std::string StackDump::take() const {
  if (::ftruncate(fd_, 0) != 0 || ::lseek(fd_, 0, SEEK_SET) < 0) return {};
  if (::pthread_kill(::pthread_self(), signal_number_) != 0) return {};
  std::string text;
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t count = ::pread(fd_, buffer.data(), buffer.size(),
                                  static_cast<off_t>(text.size()));
    if (count <= 0) return text;
    text.append(buffer.data(), static_cast<size_t>(count));
  }
}

}  // namespace smp::comm
