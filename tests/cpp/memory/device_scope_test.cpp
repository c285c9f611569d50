#include "csrc/memory/device_scope.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/cpp/memory/fake_device.h"

namespace smp::memory {
namespace {

const c10::Device kDevice = fake_device::device(1);

int device_here() {
  return c10::impl::VirtualGuardImpl(kDevice.type()).getDevice().index();
}

// A tensor whose maker does not say on which of the devices.
int device_of_a_tensor() {
  const at::TensorOptions options{c10::Device(kDevice.type())};
  return at::empty({4}, options).device().index();
}

TEST(DeviceScope, a_new_thread_enters_the_device_for_good) {
  std::thread([] {
    EXPECT_EQ(device_of_a_tensor(), 0) << "whoever made the thread";
    enter_device(kDevice);
    EXPECT_EQ(device_here(), 1);
    EXPECT_EQ(device_of_a_tensor(), 1);
  }).join();
  EXPECT_EQ(device_here(), 0);
}

TEST(DeviceScope,
     device_and_stream_are_those_of_the_stream_and_then_as_before) {
  const c10::Stream before = *current_stream(kDevice);
  const c10::Stream stream = fake_device::new_stream(1);
  {
    const DeviceScope scope(stream);
    EXPECT_EQ(device_here(), 1);
    EXPECT_EQ(*current_stream(kDevice), stream);
    const DeviceScope inner(before);
    EXPECT_EQ(*current_stream(kDevice), before);
  }
  EXPECT_EQ(device_here(), 0);
  EXPECT_EQ(*current_stream(kDevice), before);
}

TEST(DeviceScope, there_is_nothing_to_enter_on_the_cpu) {
  const c10::Device cpu(c10::DeviceType::CPU);
  enter_device(cpu);
  EXPECT_FALSE(current_stream(cpu));
  const DeviceScope scope(current_stream(cpu));
  EXPECT_EQ(device_here(), 0);
}

}  // namespace
}  // namespace smp::memory
