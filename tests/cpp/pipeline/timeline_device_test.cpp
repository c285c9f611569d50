// Tests what a trace shows of a device: when it did what tasks had asked for,
// and when copies of lanes were over.

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/lanes/copy_log.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/timeline.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::pipeline {
namespace {

using DeviceKind = TimelineEvent::Kind;

constexpr int64_t kOneMs = 1'000'000;

// A rank whose device does nothing before it is waited for, and whose clock
// goes on with its work only.
class DeviceTimelineTest : public ::testing::Test {
 protected:
  DeviceTimelineTest() {
    fake_device::reset();
    fake_device::set_lazy(true);
    fake_device::set_clock([this] { return device_ns.load(); });
  }
  ~DeviceTimelineTest() override { fake_device::reset(); }

  // Asks the current stream for work of so many nanoseconds.
  void work(int64_t ns) {
    fake_device::launch([this, ns] {
      device_ns += ns;
      ++num_done;
    });
  }

  void begin_step() {
    const c10::StreamGuard guard(stream);
    StepOptions options;
    options.policy = policy.get();
    options.num_microbatches = options.active_microbatches = 4;
    options.is_driver = false;
    options.step = next_step++;
    scheduler.begin_step(options);
  }
  void finish_step() {
    ASSERT_TRUE(scheduler.wait_until_idle(std::chrono::seconds(120)));
    scheduler.end_step();
  }
  // A task of each microbatch, which takes the device 1, 2, ... ms.
  void run_step(int num_tasks) {
    begin_step();
    for (int mb = 0; mb < num_tasks; ++mb) {
      scheduler.add_service({Phase::kForward, mb, 7, 0, 0}, "task", 0,
                            [this, mb] { work((mb + 1) * kOneMs); });
    }
    finish_step();
  }

  static std::vector<TimelineEvent> of_kind(const Timeline::Recording& all,
                                            DeviceKind kind) {
    std::vector<TimelineEvent> found;
    for (const TimelineEvent& event : all.events) {
      if (event.kind == kind) found.push_back(event);
    }
    return found;
  }

  std::atomic<int64_t> device_ns{5 * kOneMs};
  std::atomic<int> num_done{0};
  int64_t next_step = 0;
  const c10::Stream stream = fake_device::new_stream(2);
  const std::unique_ptr<Policy> policy = schedule::make_policy("interleaved");
  const std::shared_ptr<lanes::CopyLog> copies =
      std::make_shared<lanes::CopyLog>(stream.device());
  Timeline timeline{stream.device()};
  ContextThreads threads;
  Scheduler scheduler{&threads, stream.device(), &timeline};
};

TEST_F(DeviceTimelineTest, each_task_has_the_time_that_the_device_took) {
  timeline.start(100);
  run_step(3);
  run_step(2);
  EXPECT_EQ(num_done, 0) << "a step waited for the device";
  timeline.stop();
  const Timeline::Recording recording = timeline.take();
  EXPECT_EQ(num_done, 5);
  const auto rows = of_kind(recording, DeviceKind::kDevice);
  ASSERT_EQ(rows.size(), 5U);
  EXPECT_EQ(of_kind(recording, DeviceKind::kRun).size(), 5U);
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].step, i < 3 ? 0 : 1);
    EXPECT_EQ(rows[i].key.mb, static_cast<int64_t>(i < 3 ? i : i - 3));
    EXPECT_EQ(rows[i].key.module_id, 7);
    if (rows[i].begin_ns == 0) ADD_FAILURE() << "no time";
  }
  for (size_t i = 0; i < 3; ++i) {
    const auto ms = static_cast<int64_t>(i) + 1;
    EXPECT_EQ(rows[i].end_ns - rows[i].begin_ns, ms * kOneMs) << i;
    if (i == 0) continue;
    EXPECT_EQ(rows[i].begin_ns, rows[i - 1].end_ns) << i;
  }
  EXPECT_GE(rows[3].begin_ns, rows[2].end_ns);
}

TEST_F(DeviceTimelineTest, parts_of_a_task_are_rows_of_their_own) {
  timeline.start(100);
  begin_step();
  Slot slot;
  scheduler.add_service({Phase::kBackward, 1, 3, 0, 0}, "task", 0, [&] {
    work(4 * kOneMs);
    scheduler.wait(slot, "a test", 0);
    work(6 * kOneMs);
  });
  while (scheduler.awaited_ranks().empty()) std::this_thread::yield();
  scheduler.fill(slot, {});
  finish_step();
  const auto rows = of_kind(timeline.take(), DeviceKind::kDevice);
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].key.resume, 0);
  EXPECT_EQ(rows[1].key.resume, 1);
  EXPECT_EQ(rows[0].end_ns - rows[0].begin_ns, 4 * kOneMs);
  EXPECT_EQ(rows[1].end_ns - rows[1].begin_ns, 6 * kOneMs);
}

TEST_F(DeviceTimelineTest, without_a_trace_the_device_is_asked_for_tasks_only) {
  timeline.set_copies(copies);
  run_step(3);
  EXPECT_EQ(fake_device::run(stream), 3) << "more than the tasks";
  timeline.start(100);
  run_step(3);
  EXPECT_GT(fake_device::run(stream), 3);
  timeline.stop();
  run_step(3);
  EXPECT_EQ(fake_device::run(stream), 3);
}

TEST_F(DeviceTimelineTest, a_recording_that_nobody_wants_waits_for_nothing) {
  timeline.set_copies(copies);
  timeline.start(100);
  run_step(3);
  timeline.stop();
  timeline.discard();
  EXPECT_EQ(num_done, 0);
  const Timeline::Recording recording = timeline.take();
  EXPECT_TRUE(recording.events.empty());
  EXPECT_EQ(recording.num_dropped, 0);
}

TEST_F(DeviceTimelineTest, copies_of_lanes_end_when_the_device_says_so) {
  timeline.set_copies(copies);
  const lanes::Descriptor what{.lane = lanes::LaneKind::kHost,
                               .num_bytes = 4096};
  const c10::Stream copy_stream = fake_device::new_stream(2);
  copies->add_sent(3, what, copies->now_if_on(), {});  // nobody records
  timeline.start(100);
  begin_step();
  scheduler.add_service({Phase::kForward, 0, 7, 0, 0}, "task", 0, [&] {
    work(2 * kOneMs);
    const int64_t asked_ns = copies->now_if_on();
    const memory::Mark computed = memory::Mark::record(stream);
    computed.block(copy_stream);
    {
      const c10::StreamGuard guard(copy_stream);
      work(3 * kOneMs);
    }
    copies->add_sent(3, what, asked_ns, memory::Mark::record(copy_stream));
    copies->add_received(1, what, copies->now_if_on(), {});
  });
  finish_step();
  EXPECT_EQ(num_done, 0) << "a lane waited for the device";
  timeline.stop();
  const Timeline::Recording recording = timeline.take();
  const auto rows = of_kind(recording, DeviceKind::kDevice);
  const auto sent = of_kind(recording, DeviceKind::kLaneSent);
  const auto received = of_kind(recording, DeviceKind::kLaneReceived);
  ASSERT_EQ(rows.size(), 1U);
  ASSERT_EQ(sent.size(), 1U);
  ASSERT_EQ(received.size(), 1U);
  EXPECT_EQ(sent[0].peer, 3);
  EXPECT_EQ(sent[0].bytes, 4096);
  EXPECT_STREQ(sent[0].what, "host lane");
  EXPECT_GT(sent[0].begin_ns, 0);
  EXPECT_EQ(sent[0].end_ns - rows[0].end_ns, 3 * kOneMs);
  EXPECT_EQ(received[0].peer, 1);
  EXPECT_GE(received[0].end_ns, received[0].begin_ns);
}

TEST_F(DeviceTimelineTest, a_timeline_of_the_cpu_has_no_rows_of_a_device) {
  Timeline plain;
  plain.start(10);
  plain.begin_step(0, 1);
  plain.begin_run({Phase::kForward, 0, 7, 0, 0}, "", -1);
  plain.end_run();
  EXPECT_TRUE(of_kind(plain.take(), DeviceKind::kDevice).empty());
}

}  // namespace
}  // namespace smp::pipeline
