#include "csrc/health/stack_dump.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>

namespace smp::health {
namespace {

int file = -1;

// A short form of what faulthandler writes. The text is made before, since a
// handler may not allocate.
const std::string own_text =
    "Stack (most recent call first):\n  File \"user.py\", line 7 in loop\n";

std::string text_of_all() {
  std::string text;
  for (int i = 0; i < 100; ++i) {
    text += "Thread 0x1 (most recent call first):\n  <no Python frame>\n\n";
  }
  return text +
         "Thread 0x2 (most recent call first):\n  File \"other.py\"\n\n...\n";
}

const std::string all_text = text_of_all();

void write_text(const std::string& text) {
  const int before = errno;
  (void)!::write(file, text.data(), text.size());
  errno = before;
}

void write_own(int) { write_text(own_text); }
void write_all(int) { write_text(all_text); }

TEST(StackDump, ScriptIsShownHoweverManyThreadsAreIdle) {
  file = ::memfd_create("stacks", MFD_CLOEXEC);
  ASSERT_GE(file, 0);
  const int all_signal = SIGRTMAX - 3;
  const int own_signal = SIGRTMAX - 4;
  ::signal(all_signal, write_all);
  ::signal(own_signal, write_own);
  const StackDump dump(all_signal, own_signal, file);
  std::atomic<bool> is_over = false;
  std::string text;
  std::thread liveness([&] {
    text = dump.take();
    is_over = true;
  });
  while (!is_over) {  // a loop that calls nothing
  }
  liveness.join();
  ::close(file);
  EXPECT_EQ(text,
            "Thread of the script (most recent call first):\n"
            "  File \"user.py\", line 7 in loop\n\n"
            "Thread 0x2 (most recent call first):\n  File \"other.py\"\n");
}

constexpr std::chrono::milliseconds kLoop{1500};

TEST(StackDump, ThreadThatRunsShowsWhatItDoesBelowPython) {
  const int fd = ::memfd_create("stacks", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  const NativeStacks stacks(SIGRTMAX - 5, fd);
  std::atomic<pid_t> loops = 0;
  std::thread thread([&] {
    ::pthread_setname_np(::pthread_self(), "that loops");
    loops = static_cast<pid_t>(::syscall(SYS_gettid));
    std::atomic<bool> never = false;
    const auto until = std::chrono::steady_clock::now() + kLoop;
    while (!never && std::chrono::steady_clock::now() < until) {
    }
  });
  while (loops == 0) std::this_thread::yield();
  const std::string text = stacks.take(::getpid());
  thread.join();
  ::close(fd);
  EXPECT_NE(
      text.find("Native stack of thread that loops, which runs (innermost "
                "first):\n  "),
      std::string::npos)
      << text;
  EXPECT_NE(text.find("libc"), std::string::npos) << text;
}

TEST(StackDump, FrameIsNamedByLibraryAndFunction) {
  EXPECT_EQ(frame_words("/usr/lib/libtorch.so.2(_ZN2at2mmEi+0x1f) [0x7f]"),
            "libtorch.so.2: at::mm(int)");
  EXPECT_EQ(frame_words("/lib/libc.so.6(nanosleep+0x1f) [0x7f]"),
            "libc.so.6: nanosleep");
  EXPECT_EQ(frame_words("/lib/libc.so.6(+0x1f) [0x7f]"), "libc.so.6: ?");
  EXPECT_EQ(frame_words("/usr/bin/python3.11(_PyEval+0x1f) [0x7f]"),
            "python3.11: the interpreter");
  EXPECT_EQ(frame_words("[0x7f]"), "[0x7f]");
}

TEST(StackDump, StackOfTheScriptIsNotShownTwice) {
  EXPECT_EQ(join_stacks("Stack (most recent call first):\n  File \"a\"\n",
                        "Thread 0x1 (most recent call first):\n  File \"b\"\n\n"
                        "Thread 0x2 (most recent call first):\n  File \"a\"\n"),
            "Thread of the script (most recent call first):\n  File \"a\"\n\n"
            "Thread 0x1 (most recent call first):\n  File \"b\"\n");
}

}  // namespace
}  // namespace smp::health
