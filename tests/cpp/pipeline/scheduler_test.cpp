#include "csrc/pipeline/scheduler.h"

#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

using std::chrono::seconds;

class SchedulerTest : public ::testing::Test {
 protected:
  void begin(const char* policy_name, int num_microbatches, int active) {
    policy = schedule::make_policy(policy_name);
    StepOptions options;
    options.policy = policy.get();
    options.num_microbatches = num_microbatches;
    options.active_microbatches = active;
    options.step = 0;
    scheduler.begin_step(options);
  }

  void finish() {
    ASSERT_TRUE(scheduler.wait_until_idle(seconds(120)))
        << scheduler.describe();
    scheduler.end_step();
  }

  ContextThreads threads;
  Scheduler scheduler{&threads, c10::Device(c10::DeviceType::CPU)};
  std::unique_ptr<Policy> policy;
};

TEST_F(SchedulerTest, one_context_runs_at_a_time) {
  begin("interleaved", 8, 8);
  std::atomic<int> running{0};
  std::atomic<int> most{0};
  std::vector<Slot> slots(8);
  for (int mb = 0; mb < 8; ++mb) {
    scheduler.add_body(mb, "body", 0, [&, mb] {
      for (int part = 0; part < 2; ++part) {
        most = std::max(most.load(), ++running);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        --running;
        if (part == 0) scheduler.wait(slots[mb], "a test", -1);
      }
    });
  }
  for (Slot& slot : slots) scheduler.fill(slot, {});
  finish();
  EXPECT_EQ(most, 1);
}

TEST_F(SchedulerTest, active_microbatches_bounds_those_in_flight) {
  begin("interleaved", 6, 2);
  std::vector<Slot> slots(6);
  std::mutex mutex;
  int in_flight = 0;
  int most = 0;
  std::atomic<int> next_to_fill{0};
  for (int mb = 0; mb < 6; ++mb) {
    scheduler.add_body(mb, "body", 0, [&, mb] {
      {
        std::lock_guard<std::mutex> lock(mutex);
        most = std::max(most, ++in_flight);
      }
      scheduler.wait(slots[mb], "a test", -1);
      std::lock_guard<std::mutex> lock(mutex);
      --in_flight;
    });
  }
  for (Slot& slot : slots) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    scheduler.fill(slot, {});
  }
  finish();
  EXPECT_EQ(most, 2);
}

TEST_F(SchedulerTest, simple_runs_all_forwards_before_any_backward) {
  begin("simple", 4, 4);
  std::vector<std::string> log;
  for (int mb = 0; mb < 4; ++mb) {
    scheduler.add_body(mb, "body", 0, [&, mb] {
      log.push_back("F" + std::to_string(mb));
      scheduler.enter_phase(Phase::kBackward);
      log.push_back("B" + std::to_string(mb));
    });
    // The first one must wait for those that are still to be added.
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  finish();
  EXPECT_EQ(log, (std::vector<std::string>{"F0", "F1", "F2", "F3", "B0", "B1",
                                           "B2", "B3"}));
}

TEST_F(SchedulerTest, random_numbers_do_not_depend_on_who_ran_between) {
  auto draw = [&](bool interrupted) {
    begin("interleaved", 2, 2);
    std::vector<double> drawn;
    Slot slot;
    scheduler.add_body(0, "body", 11, [&] {
      drawn.push_back(at::rand({}).item<double>());
      if (interrupted) scheduler.wait(slot, "a test", -1);
      drawn.push_back(at::rand({}).item<double>());
    });
    scheduler.add_body(1, "body", 12, [&] {
      at::rand({100});
      scheduler.fill(slot, {});
    });
    finish();
    return drawn;
  };
  const auto alone = draw(false);
  const auto interrupted = draw(true);
  EXPECT_EQ(alone, interrupted);
  EXPECT_NE(alone[0], alone[1]);
}

TEST_F(SchedulerTest, an_exception_ends_waiting_contexts_and_is_kept) {
  begin("interleaved", 2, 2);
  Slot never;
  std::atomic<bool> was_told{false};
  scheduler.add_body(0, "body", 0, [&] {
    try {
      scheduler.wait(never, "an answer that never comes", 1);
    } catch (const PeerFailure&) {
      was_told = true;
      throw;
    }
  });
  scheduler.add_body(1, "body", 0,
                     [] { throw std::runtime_error("the reason"); });
  finish();
  EXPECT_TRUE(was_told);
  try {
    std::rethrow_exception(scheduler.cancel_reason());
  } catch (const std::exception& e) {
    EXPECT_STREQ(e.what(), "the reason");
  }
}

TEST_F(SchedulerTest, work_that_never_starts_is_freed_without_the_lock) {
  begin("interleaved", 1, 1);
  Slot slot;
  scheduler.add_body(0, "body", 0, [&] {
    std::string seen;
    {
      const std::shared_ptr<int> held(new int, [&](int* number) {
        delete number;
        seen = scheduler.describe();
      });
      scheduler.add_service({Phase::kForward, 0, 1, 0, 0}, "service", 0,
                            [held] { FAIL() << "started"; });
    }
    scheduler.cancel(std::make_exception_ptr(Error("the reason")));
    EXPECT_EQ(seen, "body: running");
  });
  finish();
}

TEST_F(SchedulerTest, a_follower_runs_what_was_agreed_and_nothing_else) {
  policy = schedule::make_policy("interleaved");
  StepOptions options;
  options.policy = policy.get();
  options.num_microbatches = 1;
  options.active_microbatches = 1;
  options.order = OrderRole::kFollower;
  options.step = 5;
  scheduler.begin_step(options);
  std::vector<int64_t> ran;
  for (const int64_t module_id : {1, 2, 3}) {
    scheduler.add_service({Phase::kForward, 0, module_id, 0, 0}, "service", 0,
                          [&ran, module_id] { ran.push_back(module_id); });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_TRUE(scheduler.baton_is_free());
  for (const int64_t module_id : {3, 1, 2}) {
    scheduler.add_agreed(5, {Phase::kForward, 0, module_id, 0, 0});
  }
  finish();
  EXPECT_EQ(ran, (std::vector<int64_t>{3, 1, 2}));
}

// Rank 1 of 2 under a policy that lets forwards wait; module 7 is chunk 0,
// module 8 chunk 1.
class WaitingSchedulerTest : public SchedulerTest {
 protected:
  void begin(std::unique_ptr<Policy> chosen) {
    policy = std::move(chosen);
    StepOptions options;
    options.policy = policy.get();
    options.num_microbatches = 2;
    options.active_microbatches = 2;
    options.num_partitions = 2;
    options.depth = 1;
    options.is_driver = false;
    options.chunk_idxs = &chunk_idxs;
    options.lets_wait = true;
    scheduler.begin_step(options);
  }

  void add(Phase phase, int64_t mb, int64_t module_id) {
    const TaskKey key{phase, mb, module_id, 0, 0};
    scheduler.add_service(key, "task " + schedule::to_string(key), 0, [] {});
    pause();
  }

  static void pause() {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }

  // Waits until a context has run; gives up late.
  static bool comes(const std::function<bool()>& holds) {
    for (int i = 0; i < 12000 && !holds(); ++i) pause();
    return holds();
  }

  const std::vector<int> chunk_idxs{0, 0, 0, 0, 0, 0, 0, 0, 1};
};

TEST_F(WaitingSchedulerTest, a_forward_waits_for_the_backward_before_it) {
  for (const char* name : {"zero_bubble", "interleaved"}) {
    begin(schedule::make_policy(name));
    add(Phase::kForward, 0, 7);
    add(Phase::kForward, 1, 7);
    EXPECT_EQ(scheduler.executed_actions(), "F0") << "rank 1 of 2 keeps one";
    add(Phase::kBackward, 0, 7);
    finish();
    EXPECT_EQ(scheduler.executed_actions(), "F0 B0 F1") << name;
  }
}

TEST_F(WaitingSchedulerTest, the_end_of_a_microbatch_lets_the_next_one_in) {
  begin(schedule::make_policy("zero_bubble"));
  add(Phase::kForward, 0, 7);
  add(Phase::kForward, 1, 7);
  scheduler.end_microbatch(0);  // nobody asked for its gradients
  finish();
  EXPECT_EQ(scheduler.executed_actions(), "F0 F1");
}

TEST_F(WaitingSchedulerTest, what_belongs_to_no_action_runs_at_once) {
  begin(schedule::make_listed_policy(schedule::parse_actions("F0.1 B0.1")));
  add(Phase::kBackward, 0, 8);
  EXPECT_EQ(scheduler.executed_actions(), "");
  std::atomic<bool> computed{false};
  scheduler.add_service({Phase::kForward, 0, -2, 0, 0}, "arithmetic", 0,
                        [&] { computed = true; });
  std::atomic<bool> followed{false};
  scheduler.add_body(0, "body", 0, [&] { followed = true; });
  EXPECT_TRUE(comes([&] { return computed && followed; }));
  add(Phase::kForward, 0, 8);
  finish();
  EXPECT_EQ(scheduler.executed_actions(), "F0.1 B0.1");
}

TEST_F(WaitingSchedulerTest, a_list_passes_over_what_has_nothing_to_do) {
  begin(schedule::make_listed_policy(schedule::parse_actions("B0 W0 F1")));
  add(Phase::kBackward, 0, 7);
  add(Phase::kForward, 1, 7);
  EXPECT_EQ(scheduler.executed_actions(), "B0");
  scheduler.skip_action({Phase::kWeight, 0, 0});
  finish();
  EXPECT_EQ(scheduler.executed_actions(), "B0 F1");
}

TEST_F(WaitingSchedulerTest, what_a_list_holds_back_can_be_run_all_the_same) {
  begin(schedule::make_listed_policy(schedule::parse_actions("B1 F0 F1")));
  EXPECT_EQ(scheduler.run_held_back(), "") << "nothing is there";
  add(Phase::kForward, 1, 7);
  add(Phase::kForward, 0, 7);
  EXPECT_EQ(scheduler.executed_actions(), "");
  EXPECT_EQ(scheduler.run_held_back(), "task F0:m7");
  pause();
  EXPECT_EQ(scheduler.run_held_back(), "task F1:m7");
  finish();
  EXPECT_EQ(scheduler.executed_actions(), "F0 F1");
}

TEST_F(WaitingSchedulerTest, what_was_held_back_is_not_what_was_waited_for) {
  begin(schedule::make_listed_policy(schedule::parse_actions("B1 F0 F1")));
  add(Phase::kForward, 1, 7);
  add(Phase::kForward, 0, 7);
  ASSERT_EQ(scheduler.run_held_back(), "task F0:m7");
  pause();
  add(Phase::kForward, 0, 9);  // what comes of it
  pause();
  EXPECT_EQ(scheduler.num_due_turns(), 0);
  add(Phase::kBackward, 1, 7);
  EXPECT_TRUE(comes([&] { return scheduler.num_due_turns() >= 1; }));
  while (!scheduler.run_held_back().empty()) pause();
  finish();
}

TEST(ContextThreads, the_thread_that_was_used_last_is_used_first) {
  ContextThreads threads;
  const auto run = [&](std::function<void()> work) {
    auto done = std::make_shared<std::promise<std::thread::id>>();
    auto id = done->get_future();
    threads.run([work = std::move(work), done] {
      work();
      done->set_value(std::this_thread::get_id());
    });
    return id;
  };
  std::promise<void> first_may_end;
  auto first = run([&] { first_may_end.get_future().wait(); });
  const auto second = run([] {}).get();
  first_may_end.set_value();
  EXPECT_NE(first.get(), second);
  std::map<std::thread::id, int> used;
  for (int i = 0; i < 20; ++i) {
    // Until it is idle again; on a busy machine that may not be enough.
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ++used[run([] {}).get()];
  }
  int most = 0;
  for (const auto& [id, count] : used) most = std::max(most, count);
  EXPECT_GT(most, 15) << "in turns it would be 10";
}

TEST(ContextThreads, threads_are_reused_and_nested_jobs_get_their_own) {
  ContextThreads threads;
  std::atomic<int> done{0};
  for (int round = 0; round < 50; ++round) {
    const int before = done;
    threads.run([&] { ++done; });
    while (done == before) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  EXPECT_LE(threads.num_threads(), 10);
  std::mutex mutex;
  std::condition_variable changed;
  bool second_ran = false;
  threads.run([&] {
    threads.run([&] {
      std::lock_guard<std::mutex> lock(mutex);
      second_ran = true;
      changed.notify_all();
    });
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, seconds(10), [&] { return second_ran; });
    ++done;
  });
  for (int i = 0; i < 10000 && done < 51; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  threads.join();
  EXPECT_TRUE(second_ran);
}

}  // namespace
}  // namespace smp::pipeline
