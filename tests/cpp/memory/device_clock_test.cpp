#include "csrc/memory/device_clock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "csrc/common/monotonic_clock.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::memory {
namespace {

constexpr int64_t kMs = 1'000'000;

class DeviceClockTest : public testing::Test {
 protected:
  DeviceClockTest() {
    fake_device::reset();
    fake_device::set_lazy(true);
  }
  ~DeviceClockTest() override { fake_device::reset(); }

  // The device comes to the next event when its clock shows `ns`.
  void come_at(int64_t ns) {
    device_ns = ns;
    ASSERT_EQ(fake_device::run(stream, 1), 1);
  }
  static void sleep_ms(int ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
  }

  std::atomic<int64_t> device_ns{0};
  const c10::Stream stream = fake_device::new_stream(1);
  DeviceClock clock{stream.device()};
};

TEST_F(DeviceClockTest, there_are_no_points_before_the_first_period) {
  EXPECT_EQ(clock.point(stream), nullptr);
  clock.settle();
}

TEST_F(DeviceClockTest, distances_of_points_are_those_of_the_device) {
  fake_device::set_clock([&] { return device_ns.load(); });
  clock.begin_period(stream);
  const auto first = clock.point(stream);
  const auto second = clock.point(stream);
  const auto third = clock.point(stream);
  come_at(7 * kMs);
  come_at(7 * kMs + 250);
  come_at(9 * kMs);
  come_at(13 * kMs);
  clock.settle();
  EXPECT_EQ(clock.time_of(*second).ns - clock.time_of(*first).ns,
            2 * kMs - 250);
  EXPECT_EQ(clock.time_of(*third).ns - clock.time_of(*second).ns, 4 * kMs);
}

// The clock of the device is that of the host and a constant, so the truth is
// known.
TEST_F(DeviceClockTest, times_are_right_within_the_uncertainty_that_is_told) {
  constexpr int64_t kOffset = 123'456'789'000;
  std::atomic<int64_t> fired_ns{0};
  fake_device::set_clock([&] {
    fired_ns = monotonic_ns();
    return fired_ns + kOffset;
  });
  for (int period = 0; period < 3; ++period) {
    clock.begin_period(stream);
    std::vector<DeviceClock::PointPtr> points;
    std::vector<int64_t> truth;
    fake_device::run(stream);
    for (int i = 0; i < 5; ++i) {
      points.push_back(clock.point(stream));
      sleep_ms(i % 3);  // the device is late
      fake_device::run(stream);
      truth.push_back(fired_ns);
      sleep_ms(i % 2);  // nobody looks
    }
    clock.settle();
    for (size_t i = 0; i < points.size(); ++i) {
      const DeviceClock::Time time = clock.time_of(*points[i]);
      EXPECT_LE(std::abs(time.ns - truth[i]), time.uncertainty_ns + 1);
      EXPECT_GT(time.uncertainty_ns, 0);
      // The tightest bounds count: one came at once, and was seen at once.
      EXPECT_LT(time.uncertainty_ns, 2 * kMs);
    }
  }
}

TEST_F(DeviceClockTest, a_device_that_nobody_looked_at_is_uncertain) {
  clock.begin_period(stream);
  const auto point = clock.point(stream);
  fake_device::run(stream);
  sleep_ms(6);
  clock.settle();
  EXPECT_GE(clock.time_of(*point).uncertainty_ns, 2 * kMs);
}

TEST_F(DeviceClockTest, only_settling_waits_for_the_device) {
  clock.begin_period(stream);
  const auto first = clock.point(stream);
  clock.begin_period(stream);
  const auto second = clock.point(stream);
  EXPECT_EQ(fake_device::run(stream, 1), 1) << "nothing ran until now";
  clock.settle();
  EXPECT_LE(clock.time_of(*first).ns, clock.time_of(*second).ns);
  EXPECT_EQ(fake_device::run(stream), 0) << "all is done";
}

TEST_F(DeviceClockTest, points_of_other_streams_count_from_the_same_begin) {
  fake_device::set_clock([&] { return device_ns.load(); });
  const c10::Stream copies = fake_device::new_stream(1);
  clock.begin_period(stream);
  const auto copied = clock.point(copies);
  const auto computed = clock.point(stream);
  device_ns = 3 * kMs;
  fake_device::run(copies);  // before the begin of the period
  come_at(5 * kMs);
  come_at(6 * kMs);
  clock.settle();
  EXPECT_EQ(clock.time_of(*computed).ns - clock.time_of(*copied).ns, 3 * kMs);
}

}  // namespace
}  // namespace smp::memory
