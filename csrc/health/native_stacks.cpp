#include "csrc/health/native_stacks.h"

#include <cxxabi.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace smp::health {
namespace {

constexpr int kMaxFrames = 48;
constexpr int kShownFrames = 16;
constexpr int kMaxThreads = 6;
constexpr size_t kMaxFrameBytes = 160;
constexpr int kHandlerFrames = 2;  // the handler, and the return from it
constexpr std::chrono::milliseconds kAnswer{300};

std::atomic<int> stacks_fd = -1;

void write_stack(int /*signal*/) {
  std::array<void*, kMaxFrames> frames;
  const int count = ::backtrace(frames.data(), kMaxFrames);
  ::backtrace_symbols_fd(frames.data(), count, stacks_fd);
}

struct ThreadState {
  pid_t number = 0;
  std::string name;
  char state = 'S';
};

std::vector<ThreadState> all_threads() {
  std::vector<ThreadState> found;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/task", error)) {
    const std::string number = entry.path().filename();
    ThreadState thread;
    std::from_chars(number.data(), number.data() + number.size(),
                    thread.number);
    std::ifstream file(entry.path() / "stat");
    std::string line;
    if (!std::getline(file, line)) continue;  // it has ended
    const size_t begin = line.find('(');
    const size_t end = line.rfind(')');
    if (begin == std::string::npos || end + 2 >= line.size()) continue;
    thread.name = line.substr(begin + 1, end - begin - 1);
    thread.state = line[end + 2];
    found.push_back(std::move(thread));
  }
  return found;
}

}  // namespace

NativeStacks::NativeStacks(int signal, int fd) : signal_(signal), fd_(fd) {
  // The first call loads a library, which is forbidden in a handler.
  std::array<void*, 1> frame;
  ::backtrace(frame.data(), 1);
  stacks_fd = fd;
  struct sigaction action{};
  action.sa_handler = write_stack;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

std::string NativeStacks::take(pid_t script_thread) const {
  const auto own = static_cast<pid_t>(::syscall(SYS_gettid));
  std::string text;
  int num_threads = 0;
  for (const ThreadState& thread : all_threads()) {
    const bool works = thread.state == 'R' || thread.state == 'D';
    if (thread.number == own || (!works && thread.number != script_thread)) {
      continue;
    }
    if (num_threads++ == kMaxThreads) break;
    text += "Native stack of " +
            (thread.number == script_thread ? "the thread of the script"
                                            : "thread " + thread.name) +
            (thread.state == 'R'   ? ", which runs"
             : thread.state == 'D' ? ", which waits in the system"
                                   : ", which sleeps") +
            " (innermost first):\n" + take_one(thread.number);
  }
  return text;
}

std::string NativeStacks::take_one(pid_t thread) const {
  if (::ftruncate(fd_, 0) != 0 || ::lseek(fd_, 0, SEEK_SET) < 0 ||
      ::syscall(SYS_tgkill, ::getpid(), thread, signal_) != 0) {
    return "  (it has none)\n";
  }
  std::string raw;
  const auto until = std::chrono::steady_clock::now() + kAnswer;
  while (std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::array<char, 16384> buffer;
    const ssize_t count = ::pread(fd_, buffer.data(), buffer.size(), 0);
    const std::string seen(buffer.data(), count > 0 ? count : 0);
    if (!seen.empty() && seen == raw) break;  // it writes no more
    raw = seen;
  }
  std::istringstream lines(raw);
  std::string text;
  std::string before;
  int num_frames = -kHandlerFrames;
  for (std::string line; std::getline(lines, line);) {
    if (num_frames++ < 0 || num_frames > kShownFrames) continue;
    const std::string words = frame_words(line);
    if (words != before) text += "  " + words + "\n";
    before = words;
  }
  return text.empty() ? "  (it does not answer)\n" : text;
}

std::string frame_words(const std::string& line) {
  const size_t begin = line.find('(');
  const size_t end = line.find_first_of("+)", begin);
  if (begin == std::string::npos || end == std::string::npos) return line;
  const std::string library =
      line.substr(0, begin).substr(line.substr(0, begin).rfind('/') + 1);
  const std::string symbol = line.substr(begin + 1, end - begin - 1);
  if (library.starts_with("python") || library.starts_with("libpython")) {
    return library + ": the interpreter";
  }
  if (symbol.empty()) return library + ": ?";
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status),
      std::free);
  std::string words =
      library + ": " + (readable ? readable.get() : symbol.c_str());
  if (words.size() > kMaxFrameBytes) words.resize(kMaxFrameBytes);
  return words;
}

}  // namespace smp::health
