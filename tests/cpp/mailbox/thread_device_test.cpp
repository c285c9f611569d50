// Handlers run on the device of their rank, in whichever thread of the mailbox.

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <latch>
#include <map>
#include <mutex>
#include <string>

#include "csrc/mailbox/mailbox.h"
#include "csrc/shm/shared_memory.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/memory/fake_device.h"
#include "tests/cpp/shm/local_memory.h"

namespace smp::mailbox {
namespace {

int device_of_this_thread() {
  return c10::impl::VirtualGuardImpl(fake_device::device(0).type())
      .getDevice()
      .index();
}

class MailboxDevice : public testing::TestWithParam<bool> {};

TEST_P(MailboxDevice, is_that_of_all_threads_which_deliver) {
  constexpr int kSize = 2;
  std::vector<shm::SharedMemoryPtr> memories(kSize);
  if (GetParam()) memories = shm::make_local_shared_memory(kSize, 50'000);
  std::latch all_listen(kSize);
  comm::run_ranks(kSize, [&](int rank, const comm::CommunicatorPtr& world) {
    std::mutex mutex;
    std::map<int, int> device_by_source;
    Mailbox mailbox(world, std::make_shared<health::FaultBoard>(rank),
                    std::exchange(memories[rank], nullptr),
                    {.device = fake_device::device(rank + 1)});
    mailbox.set_handler(Channel::kPipeline, [&](Message&& message) {
      const std::lock_guard lock(mutex);
      device_by_source[message.source_rank] = device_of_this_thread();
    });
    // The thread that sets a handler delivers the messages that came before.
    all_listen.arrive_and_wait();
    for (int to = 0; to < kSize; ++to) {
      Message message;
      message.channel = Channel::kPipeline;
      mailbox.post(to, std::move(message));
    }
    EXPECT_TRUE(becomes_true([&] {
      const std::lock_guard lock(mutex);
      return device_by_source.size() == kSize;
    }));
    mailbox.close();
    const std::map<int, int> expected{{0, rank + 1}, {1, rank + 1}};
    EXPECT_EQ(device_by_source, expected);
    EXPECT_EQ(device_of_this_thread(), 0) << "of the caller";
  });
}

INSTANTIATE_TEST_SUITE_P(SharedMemory, MailboxDevice, testing::Bool());

}  // namespace
}  // namespace smp::mailbox
