#include "tests/cpp/mailbox/test_delays.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/mailbox/mailbox.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/shm/local_memory.h"

namespace smp::mailbox {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kVariable = "SMP_TEST_DELAYS";
constexpr int kNumMessages = 60;

class TestDelaysTest : public ::testing::Test {
 protected:
  void TearDown() override {
    ::unsetenv(kVariable);
    TestDelays::set(0, 0);
  }
};

// Both ranks send numbered messages to each other; what each of them got.
std::vector<std::vector<int64_t>> exchange_messages(bool is_shared) {
  std::vector<shm::SharedMemoryPtr> memories(2);
  if (is_shared) memories = shm::make_local_shared_memory(2, 50'000);
  std::vector<std::vector<int64_t>> all(2);
  comm::run_ranks(2, [&](int self, const comm::CommunicatorPtr& world) {
    Mailbox mailbox(world, std::make_shared<health::FaultBoard>(self),
                    memories[self]);
    std::mutex mutex;
    std::condition_variable changed;
    mailbox.set_handler(Channel::kPipeline, [&](Message&& message) {
      std::lock_guard lock(mutex);
      all[self].push_back(message.fields[0]);
      changed.notify_all();
    });
    for (int i = 0; i < kNumMessages; ++i) {
      Message message;
      message.channel = Channel::kPipeline;
      message.fields[0] = i;
      mailbox.post(1 - self, std::move(message));
    }
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(120), [&] {
      return all[self].size() == kNumMessages;
    }));
    lock.unlock();
    mailbox.set_handler(Channel::kPipeline, {});
  });
  return all;
}

TEST_F(TestDelaysTest, delayed_messages_keep_their_order) {
  std::vector<int64_t> expected(kNumMessages);
  for (int i = 0; i < kNumMessages; ++i) expected[i] = i;
  for (const bool is_shared : {false, true}) {
    TestDelays::set(7, 4000);
    const auto begin = Clock::now();
    const auto received = exchange_messages(is_shared);
    // About 0.3 * 60 pauses of 2 ms in `post` alone.
    EXPECT_GT(Clock::now() - begin, milliseconds(15));
    EXPECT_EQ(received, std::vector(2, expected));
  }
}

// Returns how often this thread gave up its processor by itself.
int64_t num_sleeps() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

// Sleeps of a rank in many pauses at one place.
int64_t sleeps_in_pauses(int global_rank) {
  TestDelays delays(global_rank);
  const int64_t before = num_sleeps();
  for (int i = 0; i < 100; ++i) delays.pause(PausePlace::kPost);
  return num_sleeps() - before;
}

TEST_F(TestDelaysTest, the_environment_turns_them_on) {
  ::setenv(kVariable, "3:5000", 1);
  EXPECT_GT(sleeps_in_pauses(0), 10);
  ::setenv(kVariable, "3:0", 1);
  EXPECT_EQ(sleeps_in_pauses(0), 0);
}

TEST_F(TestDelaysTest, other_texts_are_refused_and_quoted) {
  for (const char* bad : {"3", "3:", ":5", "3:x", "-3:5", "3:-5", "3:5 ", "3,5",
                          "3:1000001", "x:5"}) {
    ::setenv(kVariable, bad, 1);
    try {
      TestDelays delays(0);
      ADD_FAILURE() << "no error for " << bad;
    } catch (const ValueError& e) {
      EXPECT_NE(std::string(e.what()).find(bad), std::string::npos) << e.what();
    }
  }
  EXPECT_THROW(TestDelays::set(0, -1), ValueError);
}

}  // namespace
}  // namespace smp::mailbox
