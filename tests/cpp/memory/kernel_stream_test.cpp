#include "csrc/memory/kernel_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "csrc/common/check.h"
#include "csrc/memory/on_devices.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::memory {
namespace {

// Returns the handle that the launcher of an operator gets on the stream.
void* handle_on(const c10::Stream& stream) {
  void* got = nullptr;
  const c10::StreamGuard guard(stream);
  run_on_device("an operator", stream.device(),
                [&](void* handle) -> const char* {
                  got = handle;
                  return nullptr;
                });
  return got;
}

TEST(KernelStream, a_launcher_gets_the_handle_of_the_current_stream) {
  if (!kHasNativeHandles) GTEST_SKIP() << "this torch tells none";
  const c10::Stream first = fake_device::new_stream(1);
  const c10::Stream second = fake_device::new_stream(1);
  EXPECT_EQ(handle_on(first), fake_device::handle_of(first));
  EXPECT_EQ(handle_on(second), fake_device::handle_of(second));
  EXPECT_NE(handle_on(first), handle_on(second));
  EXPECT_NE(handle_on(first), nullptr) << "the legacy stream, which no CUDA "
                                          "graph can record";
}

TEST(KernelStream, the_device_is_the_current_one_while_kernels_are_launched) {
  const c10::impl::VirtualGuardImpl impl(fake_device::device(1).type());
  ASSERT_EQ(impl.getDevice().index(), 0);
  run_on_device("op", fake_device::device(1), [&](void*) -> const char* {
    EXPECT_EQ(impl.getDevice().index(), 1);
    return nullptr;
  });
  EXPECT_EQ(impl.getDevice().index(), 0);
}

TEST(KernelStream, kernels_come_between_what_the_caller_asks_before_and_after) {
  fake_device::reset();
  fake_device::set_lazy(true);
  const c10::Stream stream = fake_device::new_stream(0);
  const c10::StreamGuard guard(stream);
  const auto order = std::make_shared<std::string>();
  fake_device::launch([order] { *order += "before "; });
  {
    const KernelStream kernels(stream.device());
    // On the stream that has this handle: the caller's, or the default one.
    const c10::StreamGuard inner(native_stream(stream).stream);
    fake_device::launch([order] { *order += "kernel "; });
    kernels.finish();
  }
  fake_device::launch([order] { *order += "after"; });
  fake_device::run_all();
  EXPECT_EQ(*order, "before kernel after");
  fake_device::reset();
}

TEST(KernelStream, what_went_wrong_is_raised_with_the_operator) {
  try {
    run_on_device("norm", fake_device::device(0),
                  [](void*) { return "invalid configuration"; });
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("norm on FAKE: invalid config"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace smp::memory
