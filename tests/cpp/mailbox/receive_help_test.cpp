// Threads that wait for a message and receive meanwhile.

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/mailbox/mailbox.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/shm/local_memory.h"

namespace smp::mailbox {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

Message with_number(int64_t number) {
  Message message;
  message.channel = Channel::kPipeline;
  message.fields[0] = number;
  return message;
}

// Calls `body(rank, mailbox)` on two ranks that share memory.
void run_two(const std::function<void(int, Mailbox&)>& body,
             int64_t ring_bytes = 50'000) {
  auto memories = shm::make_local_shared_memory(2, ring_bytes);
  comm::run_ranks(2, [&](int self, const comm::CommunicatorPtr& world) {
    Mailbox mailbox(world, std::make_shared<health::FaultBoard>(self),
                    memories[self]);
    body(self, mailbox);
    world->barrier();
    mailbox.set_handler(Channel::kPipeline, {});
  });
}

// The receiving thread has to find that there is nothing to do first.
bool help(Mailbox& mailbox, const std::function<bool()>& done,
          bool is_alone = false) {
  for (int i = 0; i < 2000; ++i) {
    if (mailbox.help_until(done, [=] { return is_alone; })) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

TEST(ReceiveHelp, HandlersRunInTheWaitingThread) {
  run_two([](int self, Mailbox& mailbox) {
    constexpr int64_t kCount = 500;
    std::atomic<int64_t> received{0};
    std::atomic<int64_t> elsewhere{0};
    const auto waiting = std::this_thread::get_id();
    mailbox.set_handler(Channel::kPipeline, [&](Message&&) {
      ++received;
      if (std::this_thread::get_id() != waiting) ++elsewhere;
      if (self == 1) mailbox.post(0, with_number(received));
    });
    std::mutex never;  // `done` may lock; handlers may not be held up by it
    const auto done = [&] {
      std::lock_guard lock(never);
      return received == kCount;
    };
    if (self == 1) {
      EXPECT_TRUE(help(mailbox, done));
      return;
    }
    for (int64_t i = 1; i <= kCount; ++i) {
      mailbox.post(1, with_number(i));
      while (received < i) {
        mailbox.help_until([&] { return received >= i; }, [] { return true; });
      }
    }
    EXPECT_LT(elsewhere.load(), kCount) << "nobody helped";
  });
}

TEST(ReceiveHelp, HandlersSeeAPlainThread) {
  run_two([](int self, Mailbox& mailbox) {
    std::atomic<bool> done{false};
    std::atomic<bool> is_inference{true};
    mailbox.set_handler(Channel::kPipeline, [&](Message&&) {
      is_inference = c10::InferenceMode::is_enabled();
      done = true;
    });
    if (self == 0) {
      mailbox.post(1, with_number(0));
      return;
    }
    const c10::InferenceMode guard;
    EXPECT_TRUE(help(mailbox, [&] { return done.load(); }));
    EXPECT_FALSE(is_inference);
    EXPECT_TRUE(c10::InferenceMode::is_enabled());
  });
}

TEST(ReceiveHelp, OneThreadAtATime) {
  run_two([](int self, Mailbox& mailbox) {
    if (self == 1) return;
    std::atomic<bool> helps{false};
    std::atomic<bool> ends{false};
    std::thread first([&] {
      EXPECT_TRUE(help(mailbox, [&] {
        helps = true;
        return ends.load();
      }));
    });
    while (!helps) std::this_thread::yield();
    EXPECT_FALSE(mailbox.help_until([] { return true; }, [] { return true; }));
    ends = true;
    mailbox.wake_helper();
    first.join();
    EXPECT_TRUE(help(mailbox, [] { return true; }));
  });
}

TEST(ReceiveHelp, TheReceivingThreadGoesOnAfterwards) {
  run_two([](int self, Mailbox& mailbox) {
    std::mutex mutex;
    std::condition_variable changed;
    int64_t received = 0;
    mailbox.set_handler(Channel::kPipeline, [&](Message&&) {
      std::lock_guard lock(mutex);
      ++received;
      changed.notify_all();
    });
    for (int64_t i = 1; i <= 200; ++i) {
      EXPECT_TRUE(help(mailbox, [] { return true; }));
      mailbox.post(1 - self, with_number(i));
      std::unique_lock lock(mutex);
      ASSERT_TRUE(
          changed.wait_for(lock, seconds(20), [&] { return received >= i; }));
    }
  });
}

TEST(ReceiveHelp, CloseSendsTheHelperAway) {
  auto memories = shm::make_local_shared_memory(2, 50'000);
  comm::run_ranks(2, [&](int self, const comm::CommunicatorPtr& world) {
    Mailbox mailbox(world, std::make_shared<health::FaultBoard>(self),
                    memories[self]);
    std::atomic<bool> helps{false};
    std::thread helper([&] {
      EXPECT_TRUE(help(mailbox, [&] {
        helps = true;
        return false;
      }));
    });
    while (!helps) std::this_thread::yield();
    mailbox.close();
    helper.join();
    EXPECT_FALSE(mailbox.help_until([] { return false; }, [] { return true; }));
  });
}

// Helpers come and go, and none of the messages stays in a ring.
TEST(ReceiveHelp, NothingIsLostWhileTheRolesChange) {
  run_two(
      [](int self, Mailbox& mailbox) {
        constexpr int64_t kCount = 3000;
        std::mutex mutex;
        std::condition_variable changed;
        int64_t last = -1;
        int64_t num_wrong = 0;
        mailbox.set_handler(Channel::kPipeline, [&](Message&& message) {
          std::lock_guard lock(mutex);
          if (message.fields[0] != last + 1) ++num_wrong;
          last = message.fields[0];
          changed.notify_all();
        });
        std::atomic<bool> ends{false};
        const auto come_and_go = [&](int seed) {
          std::mt19937 random(seed);
          while (!ends) {
            int64_t turns = random() % 4;
            mailbox.help_until([&] { return turns-- <= 0 || ends; },
                               [&] { return random() % 2 == 0; });
            if (random() % 8 == 0) {
              std::this_thread::sleep_for(microseconds(random() % 50));
            }
            mailbox.wake_helper();
          }
        };
        std::thread one([&] { come_and_go(1); });
        std::thread other([&] { come_and_go(2); });
        std::mt19937 random(3 + self);
        for (int64_t i = 0; i < kCount; ++i) {
          mailbox.post(1 - self, with_number(i));
          if (random() % 64 == 0) {
            std::unique_lock lock(mutex);
            EXPECT_TRUE(changed.wait_for(lock, seconds(20),
                                         [&] { return last >= i || ends; }));
          }
        }
        {
          std::unique_lock lock(mutex);
          EXPECT_TRUE(changed.wait_for(lock, seconds(20),
                                       [&] { return last == kCount - 1; }));
        }
        ends = true;
        mailbox.wake_helper();
        one.join();
        other.join();
        EXPECT_EQ(num_wrong, 0);
      },
      4096);
}

}  // namespace
}  // namespace smp::mailbox
