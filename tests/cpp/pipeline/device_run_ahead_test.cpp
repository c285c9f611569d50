// Tests how far the host of a rank runs ahead of its device: far enough that
// the device never runs dry, and not so far that the policy has nothing to
// choose.

#include "csrc/pipeline/device_run_ahead.h"

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/pipeline/scheduler.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::pipeline {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kMicrobatches = 8;
constexpr int kOperationModule = -2;

// Rank 1 of 2 whose device only does what a test lets it do. Modules 6 and 7
// are chunk 0, module 8 is chunk 1.
class RunAheadTest : public ::testing::Test {
 protected:
  RunAheadTest() {
    fake_device::reset();
    fake_device::set_lazy(true);
  }
  ~RunAheadTest() override { fake_device::reset(); }

  void begin(OrderRole order = OrderRole::kFree, bool lets_wait = true,
             const char* actions = nullptr) {
    policy =
        actions ? schedule::make_listed_policy(schedule::parse_actions(actions))
                : schedule::make_policy("interleaved");
    StepOptions options;
    options.policy = policy.get();
    options.num_microbatches = kMicrobatches;
    options.active_microbatches = kMicrobatches;
    options.num_partitions = 2;
    options.depth = 1;
    options.is_driver = false;
    options.order = order;
    options.chunk_idxs = &chunk_idxs;
    options.lets_wait = lets_wait;
    const c10::StreamGuard guard(stream);
    scheduler.begin_step(options);
  }

  // A service that asks the device for one kernel.
  void add(Phase phase, int64_t mb, int64_t module_id = 7) {
    const TaskKey key{phase, mb, module_id, 0, 0};
    scheduler.add_service(key, schedule::to_string(key), 0, [this, key] {
      {
        const std::lock_guard lock(mutex);
        asked.push_back(schedule::to_string(key));
      }
      fake_device::launch([this] { ++num_done; });
    });
  }
  void add_forwards(int num) {
    for (int mb = 0; mb < num; ++mb) add(Phase::kForward, mb);
  }

  std::vector<std::string> asked_now() {
    const std::lock_guard lock(mutex);
    return asked;
  }
  // Once the host has come so far, whether it goes no further.
  bool stays_at(size_t num_asked) {
    const auto limit = std::chrono::steady_clock::now() + seconds(120);
    while (asked_now().size() < num_asked &&
           std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(microseconds(100));
    }
    std::this_thread::sleep_for(milliseconds(10));
    return asked_now().size() == num_asked;
  }
  // The device does the next kernel and what is marked behind it.
  void do_one() {
    const int before = num_done;
    while (num_done == before && fake_device::run(stream, 1) == 1) {
    }
    fake_device::run(stream, 1);
  }

  void finish() {
    const auto limit = std::chrono::steady_clock::now() + seconds(120);
    while (!scheduler.is_idle() && std::chrono::steady_clock::now() < limit) {
      fake_device::run(stream);
      std::this_thread::sleep_for(microseconds(100));
    }
    ASSERT_TRUE(scheduler.is_idle()) << scheduler.describe();
    scheduler.end_step();
  }

  const std::vector<int> chunk_idxs{0, 0, 0, 0, 0, 0, 0, 0, 1};
  const c10::Stream stream = fake_device::new_stream(1);
  std::unique_ptr<Policy> policy;
  std::atomic<int> num_done{0};  // kernels
  std::mutex mutex;
  std::vector<std::string> asked;
  Timeline timeline;
  ContextThreads threads;
  Scheduler scheduler{&threads, stream.device(), &timeline, nullptr,
                      std::make_shared<memory::DeviceMeter>(stream.device())};
};

TEST_F(RunAheadTest, one_task_runs_and_one_is_behind_it) {
  for (const bool lets_wait : {true, false}) {
    asked.clear();
    num_done = 0;
    begin(OrderRole::kFree, lets_wait);
    add_forwards(6);
    for (int done = 0; done < 6; ++done) {
      const size_t expected = std::min(done + 2, 6);
      ASSERT_TRUE(stays_at(expected)) << asked_now().size() << " asked after "
                                      << done << ", wanted " << expected;
      do_one();
    }
    finish();
  }
}

TEST_F(RunAheadTest, what_came_meanwhile_is_chosen_first) {
  begin();
  add_forwards(5);
  ASSERT_TRUE(stays_at(2));
  add(Phase::kBackward, 0);
  ASSERT_TRUE(stays_at(2)) << "the device has enough to do";
  do_one();
  ASSERT_TRUE(stays_at(3));
  EXPECT_EQ(asked_now().back(), "B0:m7");
  finish();
  EXPECT_EQ(scheduler.executed_actions(), "F0 F1 B0 F2 F3 F4");
}

TEST_F(RunAheadTest, what_is_nobodys_choice_runs_at_once_and_is_no_task) {
  begin();
  add_forwards(4);
  ASSERT_TRUE(stays_at(2));
  for (int mb = 0; mb < 3; ++mb) add(Phase::kForward, mb, kOperationModule);
  add(Phase::kForward, 1, 6);  // a further part of the last action
  ASSERT_TRUE(stays_at(6));
  do_one();
  ASSERT_TRUE(stays_at(7)) << "the second task has not begun, however long";
  finish();
}

TEST_F(RunAheadTest, all_that_is_ready_waits_where_the_policy_orders_it_all) {
  begin(OrderRole::kFree, /*lets_wait=*/false);
  add_forwards(4);
  ASSERT_TRUE(stays_at(2));
  add(Phase::kForward, 0, kOperationModule);
  EXPECT_TRUE(stays_at(2));
  finish();
}

TEST_F(RunAheadTest, a_given_order_is_asked_for_at_once) {
  begin(OrderRole::kFree, true, "F0 F1 F2 F3 F4 F5");
  add_forwards(6);
  EXPECT_TRUE(stays_at(6));
  finish();
}

TEST_F(RunAheadTest, a_follower_asks_for_what_was_agreed_at_once) {
  begin(OrderRole::kFollower);
  add_forwards(6);
  for (int mb = 0; mb < 6; ++mb) {
    scheduler.add_agreed(0, {Phase::kForward, mb, 7, 0, 0});
  }
  EXPECT_TRUE(stays_at(6));
  finish();
}

TEST_F(RunAheadTest, a_leader_decides_when_its_device_needs_it) {
  std::vector<std::string> published;
  scheduler.set_order_sink([&](int64_t, const TaskKey& key) {
    published.push_back(schedule::to_string(key));
  });
  begin(OrderRole::kLeader);
  add_forwards(4);
  ASSERT_TRUE(stays_at(2));
  add(Phase::kBackward, 1);
  finish();
  const std::vector<std::string> expected{"F0:m7", "F1:m7", "B1:m7", "F2:m7",
                                          "F3:m7"};
  EXPECT_EQ(published, expected);
}

TEST_F(RunAheadTest, a_step_that_ends_early_does_not_wait_for_the_device) {
  begin();
  add_forwards(5);
  ASSERT_TRUE(stays_at(2));
  scheduler.cancel(std::make_exception_ptr(std::runtime_error("over")));
  EXPECT_TRUE(scheduler.wait_until_idle(seconds(120)));
  scheduler.end_step();
  do_one();
  EXPECT_TRUE(stays_at(2)) << "nothing of it begins afterwards";
  fake_device::run(stream);
}

TEST_F(RunAheadTest,
       the_schedule_is_not_passed_over_for_what_the_device_holds) {
  begin();
  add_forwards(4);
  ASSERT_TRUE(stays_at(2));
  EXPECT_EQ(scheduler.run_held_back(), "");
  EXPECT_TRUE(stays_at(2));
  finish();
}

TEST_F(RunAheadTest, a_trace_says_that_the_device_had_enough_to_do) {
  timeline.start(100);
  begin();
  add_forwards(3);
  ASSERT_TRUE(stays_at(2));
  finish();
  bool is_told = false;
  for (const TimelineEvent& event : timeline.take().events) {
    is_told |= event.kind == TimelineEvent::Kind::kIdle && event.key.mb == 2 &&
               std::string(event.what).find("the device") == 0;
  }
  EXPECT_TRUE(is_told);
}

TEST_F(RunAheadTest, the_cpu_is_never_full) {
  const c10::Device cpu(c10::DeviceType::CPU);
  DeviceRunAhead ahead(cpu, std::make_shared<memory::DeviceMeter>(cpu), [] {});
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(ahead.begin_turn(true));
    ahead.mark();
    EXPECT_FALSE(ahead.is_full());
  }
}

// Services in any order, some of which wait in the middle for a device or for
// nothing, on a device that takes any time: all end, and at most two tasks are
// ahead at any time.
TEST_F(RunAheadTest, a_random_step_ends_and_never_has_more_than_two_ahead) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    std::atomic<bool> is_over{false};
    std::thread device([&, device_random = std::mt19937(seed + 99)]() mutable {
      while (!is_over) {
        std::this_thread::sleep_for(microseconds(device_random() % 300));
        fake_device::run(stream, 1 + static_cast<int>(device_random() % 3));
      }
    });
    std::atomic<int> ahead{0};
    std::atomic<int> most{0};
    const auto launch = [&] {
      most = std::max(most.load(), ++ahead);
      fake_device::launch([&] { --ahead; });
    };
    std::vector<Slot> slots(40);
    begin(OrderRole::kFree, /*lets_wait=*/false);
    for (int i = 0; i < 40; ++i) {
      const auto phase = random() % 2 == 0 ? Phase::kForward : Phase::kBackward;
      const bool waits = random() % 3 == 0;
      // Each is an action of its own.
      const TaskKey key{phase, 8 * i + i % 8, 7 + (i % 2), 0, 0};
      scheduler.add_service(key, schedule::to_string(key), 0, [&, i, waits] {
        launch();
        if (!waits) return;
        fake_device::launch([&, i] { scheduler.fill(slots[i], {}); });
        scheduler.wait(slots[i], "the device", -1);
        launch();
      });
      if (random() % 4 == 0) {
        std::this_thread::sleep_for(microseconds(random() % 500));
      }
    }
    EXPECT_TRUE(scheduler.wait_until_idle(seconds(120)))
        << seed << ": " << scheduler.describe();
    is_over = true;
    device.join();
    fake_device::run(stream);
    scheduler.end_step();
    EXPECT_EQ(ahead, 0);
    EXPECT_EQ(most, 2) << seed;
  }
}

}  // namespace
}  // namespace smp::pipeline
