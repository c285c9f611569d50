#include "csrc/pipeline/timeline.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <thread>

#include "csrc/common/check.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/wire.h"

namespace smp::pipeline {
namespace {

using EventKind = TimelineEvent::Kind;
using std::chrono::milliseconds;

schedule::TaskKey task(int64_t mb) { return {Phase::kForward, mb, 7, 0, 0}; }

std::vector<TimelineEvent> only(const Timeline::Recording& recording,
                                EventKind kind) {
  std::vector<TimelineEvent> found;
  for (const TimelineEvent& event : recording.events) {
    if (event.kind == kind) found.push_back(event);
  }
  return found;
}

TEST(TimelineTest, records_nothing_unless_started) {
  Timeline timeline;
  timeline.begin_step(0, 1);
  timeline.begin_run(task(0), "", -1);
  timeline.end_run();
  timeline.end_step();
  EXPECT_TRUE(timeline.take().events.empty());
  timeline.start(8);
  timeline.stop();
  timeline.begin_run(task(0), "", -1);
  timeline.end_run();
  EXPECT_TRUE(timeline.take().events.empty());
}

TEST(TimelineTest, ring_keeps_the_youngest_in_order_and_counts_the_rest) {
  Timeline timeline;
  timeline.start(4);
  for (int mb = 0; mb < 10; ++mb) {
    timeline.begin_run(task(mb), "", -1);
    timeline.end_run();
  }
  const Timeline::Recording recording = timeline.take();
  const auto runs = only(recording, EventKind::kRun);
  ASSERT_EQ(recording.events.size(), 4U);
  ASSERT_FALSE(runs.empty());
  EXPECT_EQ(runs.back().key.mb, 9);
  for (size_t i = 1; i < runs.size(); ++i) {
    EXPECT_EQ(runs[i].key.mb, runs[i - 1].key.mb + 1);
  }
  EXPECT_GE(recording.num_dropped, 6);
  EXPECT_TRUE(timeline.take().events.empty()) << "they were handed over";
  timeline.start(4);
  EXPECT_EQ(timeline.take().num_dropped, 0);
}

TEST(TimelineTest, refuses_a_ring_without_room) {
  Timeline timeline;
  EXPECT_THROW(timeline.start(0), ValueError);
  EXPECT_FALSE(timeline.is_on());
}

TEST(TimelineTest,
     tensors_of_a_message_are_named_and_those_to_oneself_are_not) {
  Timeline timeline;
  timeline.start(16);
  Header header;
  header.kind = Kind::kForwardRequest;
  header.mb = 3;
  header.request_id = 21;
  mailbox::Message message;
  header.write_to(message);
  message.tensors.resize(3);
  message.tensors[0].data = at::empty({2, 5}, at::kFloat);
  message.tensors[0].ref = {1, 99};
  message.tensors[1].data = at::empty({1}, at::kDouble);  // without a name
  timeline.record_tensors(EventKind::kSent, 1, 2, message);
  timeline.record_tensors(EventKind::kSent, 1, 1, message);
  const auto sent = timeline.take().events;
  ASSERT_EQ(sent.size(), 2U);
  EXPECT_EQ(sent[0].ref.id, 99);
  EXPECT_EQ(sent[0].bytes, 40);
  EXPECT_EQ(sent[0].key.mb, 3);
  EXPECT_STREQ(sent[0].what, "forward request");
  EXPECT_EQ(sent[1].ref.owner_rank, 1);
  EXPECT_EQ(sent[1].ref.id, 21);
  // The other end gives it the same name.
  timeline.record_tensors(EventKind::kReceived, 2, 1, message);
  const auto received = timeline.take().events;
  ASSERT_EQ(received.size(), 2U);
  EXPECT_EQ(received[1].ref.owner_rank, 1);
  EXPECT_EQ(received[1].ref.id, 21);
}

// One body that waits for 5 ms in the middle.
TEST(TimelineTest, a_scheduler_tells_runs_waits_and_idle_times) {
  Timeline timeline;
  ContextThreads threads;
  Scheduler scheduler(&threads, c10::Device(c10::DeviceType::CPU), &timeline);
  const auto policy = schedule::make_policy("interleaved");
  StepOptions options;
  options.policy = policy.get();
  options.step = 5;
  timeline.start(100);
  scheduler.begin_step(options);
  Slot slot;
  scheduler.add_body(0, "body", 0, [&] {
    scheduler.wait(slot, "a test", 3);
    scheduler.enter_phase(Phase::kBackward);
  });
  while (scheduler.awaited_ranks().empty()) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(5));
  scheduler.fill(slot, {});
  ASSERT_TRUE(scheduler.wait_until_idle(std::chrono::seconds(120)));
  scheduler.end_step();
  const Timeline::Recording recording = timeline.take();

  const auto runs = only(recording, EventKind::kRun);
  ASSERT_EQ(runs.size(), 3U);
  EXPECT_EQ(runs[0].key.resume, 0);
  EXPECT_EQ(runs[2].key.phase, Phase::kBackward);
  for (size_t i = 1; i < runs.size(); ++i) {
    EXPECT_LE(runs[i - 1].end_ns, runs[i].begin_ns);
    EXPECT_EQ(runs[i].step, 5);
  }
  const auto waits = only(recording, EventKind::kWait);
  ASSERT_EQ(waits.size(), 1U);
  EXPECT_STREQ(waits[0].what, "a test");
  EXPECT_EQ(waits[0].peer, 3);
  EXPECT_GE(waits[0].end_ns - waits[0].begin_ns, 3'000'000);
  bool has_idle_of_wait = false;
  for (const TimelineEvent& idle : only(recording, EventKind::kIdle)) {
    if (idle.peer == 3) {
      has_idle_of_wait = true;
      EXPECT_GE(idle.begin_ns, runs[0].end_ns);
      EXPECT_LE(idle.end_ns, runs[1].begin_ns);
    }
  }
  EXPECT_TRUE(has_idle_of_wait);
  const auto steps = only(recording, EventKind::kStep);
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_LE(steps[0].begin_ns, runs[0].begin_ns);
  EXPECT_GE(steps[0].end_ns, runs[2].end_ns);
}

}  // namespace
}  // namespace smp::pipeline
