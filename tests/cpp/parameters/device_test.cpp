// Tests where memory of parameters comes from on a rank that is not the first
// of its host, in threads that have another device.

#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <thread>

#include "csrc/parameters/sharded_parameter.h"
#include "csrc/parameters/storage_pool.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::parameters {
namespace {

const c10::Device kDevice = fake_device::device(1);

TEST(ParameterDevice, the_pool_takes_memory_on_its_own_device) {
  StoragePool pool(kDevice);
  std::thread([&] {
    const c10::impl::VirtualGuardImpl impl(kDevice.type());
    ASSERT_EQ(impl.getDevice().index(), 0) << "that of a new thread";
    const at::DataPtr memory =
        pool.take(1024, c10::GetAllocator(kDevice.type()));
    EXPECT_EQ(memory.device(), kDevice);
    EXPECT_EQ(impl.getDevice().index(), 0) << "it has been put back";
  }).join();
}

TEST(ParameterDevice, a_parameter_that_becomes_whole_is_on_its_device) {
  const at::TensorOptions options(kDevice);
  StoragePool pool(kDevice);
  ShardedParameter sharded(at::zeros({4, 6}, options), at::zeros({12}, options),
                           2, pool);
  std::thread([&] { sharded.allocate(); }).join();
  EXPECT_EQ(sharded.whole().storage().data_ptr().device(), kDevice);
  EXPECT_EQ(sharded.whole().device(), kDevice);
}

}  // namespace
}  // namespace smp::parameters
