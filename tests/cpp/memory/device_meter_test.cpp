#include "csrc/memory/device_meter.h"

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/cpp/memory/fake_device.h"

namespace smp::memory {
namespace {

using std::chrono::milliseconds;

class DeviceMeterTest : public testing::Test {
 protected:
  DeviceMeterTest() {
    fake_device::reset();
    fake_device::set_lazy(true);
  }
  ~DeviceMeterTest() override { fake_device::reset(); }

  void ask_for_tasks(int num_tasks) {
    for (int i = 0; i < num_tasks; ++i) {
      fake_device::launch([] {});
      meter.mark();
    }
  }

  const c10::Stream stream = fake_device::new_stream(1);
  const c10::StreamGuard guard{stream};
  DeviceMeter meter{stream.device(), {.longest_task = milliseconds(200)}};
};

TEST_F(DeviceMeterTest, a_device_without_work_makes_no_progress) {
  EXPECT_EQ(meter.read(), meter.read()) << "nothing was ever asked";
  ask_for_tasks(3);
  fake_device::run_all();
  const int64_t done = meter.read();
  EXPECT_EQ(meter.read(), done) << "all is done";
}

TEST_F(DeviceMeterTest, each_task_that_is_done_counts) {
  ask_for_tasks(5);
  fake_device::run_all();
  EXPECT_EQ(meter.read(), 5);
}

TEST_F(DeviceMeterTest, work_in_flight_counts_until_a_task_has_taken_too_long) {
  ask_for_tasks(2);
  const int64_t first = meter.read();
  EXPECT_GT(meter.read(), first) << "it computes";
  std::this_thread::sleep_for(milliseconds(250));
  const int64_t hangs = meter.read();
  EXPECT_EQ(meter.read(), hangs) << "nothing comes to its end";
  fake_device::run(stream, 2);  // the first kernel and its mark
  const int64_t goes_on = meter.read();
  EXPECT_GT(goes_on, hangs);
  EXPECT_GT(meter.read(), goes_on) << "the second task has its own time";
}

TEST_F(DeviceMeterTest, it_counts_on_with_more_tasks_ahead_than_it_marks) {
  ask_for_tasks(1000);
  fake_device::run_all();
  const int64_t marked = meter.read();
  EXPECT_GT(marked, 100);
  EXPECT_EQ(meter.read(), marked);
  ask_for_tasks(1);
  fake_device::run_all();
  EXPECT_GT(meter.read(), marked);
}

TEST_F(DeviceMeterTest, another_thread_looks_on_the_device_itself) {
  ask_for_tasks(1);
  std::thread([&] {
    fake_device::run_all();
    EXPECT_EQ(meter.read(), 1);
  }).join();
}

TEST_F(DeviceMeterTest, the_cpu_is_never_behind) {
  DeviceMeter cpu{c10::Device(c10::DeviceType::CPU)};
  cpu.mark();
  EXPECT_EQ(cpu.read(), 0);
}

}  // namespace
}  // namespace smp::memory
