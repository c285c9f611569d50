#include "csrc/health/stack_dump.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string_view>
#include <thread>

namespace smp::health {
namespace {

using std::chrono::milliseconds;

// A thread that runs nothing but system calls answers within microseconds.
constexpr milliseconds kAnswerTimeout{1000};
constexpr std::string_view kNoFrame = "<no Python frame>";

std::string_view body_of(std::string_view block) {
  const size_t end_of_heading = block.find('\n');
  return end_of_heading == std::string_view::npos
             ? std::string_view()
             : block.substr(end_of_heading + 1);
}

}  // namespace

StackDump::StackDump(int all_signal, int own_signal, int fd, int native_signal)
    : all_signal_(all_signal),
      own_signal_(own_signal),
      fd_(fd),
      script_thread_(static_cast<pid_t>(::syscall(SYS_gettid))) {
  if (native_signal > 0) native_.emplace(native_signal, fd);
}

std::string StackDump::take() const {
  // The script's stack is taken first, alone. The other dump ends after a
  // number of threads, newest first, and a pipeline has many idle threads.
  std::string script;
  if (::ftruncate(fd_, 0) == 0 && ::lseek(fd_, 0, SEEK_SET) >= 0 &&
      ::syscall(SYS_tgkill, ::getpid(), script_thread_, own_signal_) == 0) {
    const auto until = std::chrono::steady_clock::now() + kAnswerTimeout;
    for (std::string seen; std::chrono::steady_clock::now() < until;) {
      std::this_thread::sleep_for(milliseconds(5));
      script = read();
      if (!script.empty() && script == seen) break;  // it writes no more
      seen = script;
    }
  }
  std::string all;
  if (::ftruncate(fd_, 0) == 0 && ::lseek(fd_, 0, SEEK_SET) >= 0 &&
      ::pthread_kill(::pthread_self(), all_signal_) == 0) {
    all = read();
  }
  std::string text = join_stacks(script, all);
  if (!native_) return text;
  if (!text.empty()) text.push_back('\n');
  return text + native_->take(script_thread_);
}

std::string StackDump::read() const {
  std::string text;
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t count = ::pread(fd_, buffer.data(), buffer.size(),
                                  static_cast<off_t>(text.size()));
    if (count <= 0) return text;
    text.append(buffer.data(), static_cast<size_t>(count));
  }
}

std::string join_stacks(const std::string& script, const std::string& all) {
  const std::string_view own = body_of(script);
  std::string text;
  if (!own.empty()) {
    text = "Thread of the script (most recent call first):\n";
    text.append(own);
    if (text.back() != '\n') text.push_back('\n');
  }
  std::string_view rest = all;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find("\n\n"), rest.size());
    const std::string_view block = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 2, rest.size()));
    const std::string_view body = body_of(block);
    // The script may have moved on between the two dumps; a stack that appears
    // twice does no harm.
    const bool is_script = !own.empty() && own.substr(0, body.size()) == body;
    if (body.empty() || is_script ||
        block.find(kNoFrame) != std::string_view::npos) {
      continue;
    }
    if (!text.empty()) text.push_back('\n');
    text.append(block);
    if (text.back() != '\n') text.push_back('\n');
  }
  return text;
}

}  // namespace smp::health
