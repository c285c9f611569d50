#include "csrc/health/stack_dump.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <thread>

namespace smp::health {
namespace {

int file = -1;

// What faulthandler writes, in short. Made before: a handler may not allocate.
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

TEST(StackDump, StackOfTheScriptIsNotShownTwice) {
  EXPECT_EQ(join_stacks("Stack (most recent call first):\n  File \"a\"\n",
                        "Thread 0x1 (most recent call first):\n  File \"b\"\n\n"
                        "Thread 0x2 (most recent call first):\n  File \"a\"\n"),
            "Thread of the script (most recent call first):\n  File \"a\"\n\n"
            "Thread 0x1 (most recent call first):\n  File \"b\"\n");
}

}  // namespace
}  // namespace smp::health
