#include "csrc/memory/host_allocator.h"
#include "tests/cpp/memory/resident_bytes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <atomic>
#include <thread>
#include <vector>

namespace smp::memory {
namespace {

class HostAllocation : public testing::Test {
 protected:
  HostAllocation() {
    allocator_.uninstall();
    allocator_.install();
  }
  ~HostAllocation() override { allocator_.uninstall(); }

  HostAllocator& allocator_ = HostAllocator::instance();
  const HostAllocator::Stats before_ = allocator_.stats();

  int64_t num_mapped() const {
    return allocator_.stats().num_mapped - before_.num_mapped;
  }
  int64_t num_reused() const {
    return allocator_.stats().num_reused - before_.num_reused;
  }
  int64_t cached() const { return allocator_.stats().cached_bytes; }
  int64_t live() const {
    return allocator_.stats().live_bytes - before_.live_bytes;
  }
};

at::Tensor filled(int64_t num_mib, int value = 1) {
  return at::full({num_mib * kMiB}, value, at::kByte);
}

TEST_F(HostAllocation, memory_is_used_again_by_the_same_size) {
  const void* first = nullptr;
  for (int i = 0; i < 5; ++i) {
    const at::Tensor tensor = filled(7);
    if (i == 0) first = tensor.const_data_ptr();
    EXPECT_EQ(tensor.const_data_ptr(), first);
    EXPECT_EQ(live(), 7 * kMiB);
    EXPECT_EQ(cached(), 0);
  }
  EXPECT_EQ(num_mapped(), 1);
  EXPECT_EQ(num_reused(), 4);
  EXPECT_EQ(cached(), 7 * kMiB);
  EXPECT_EQ(live(), 0);
}

TEST_F(HostAllocation, want_of_memory_is_noted_before_anything_is_freed) {
  const int64_t at_first = allocator_.stats().live_bytes;
  allocator_.set_limit(at_first + 20 * kMiB);
  {
    const at::Tensor held = filled(12);
    EXPECT_ANY_THROW(filled(9));
    EXPECT_NO_THROW(filled(8));
  }
  allocator_.set_limit(0);
  const HostAllocator::Stats after = allocator_.stats();
  EXPECT_EQ(after.num_failures, before_.num_failures + 1);
  EXPECT_EQ(after.failed_bytes, 9 * kMiB);
  EXPECT_EQ(after.live_at_failure_bytes, at_first + 12 * kMiB);
  EXPECT_NO_THROW(filled(40));
}

TEST_F(HostAllocation, small_tensors_are_made_as_before) {
  const at::Tensor small = at::empty({kMiB}, at::kByte);
  EXPECT_EQ(num_mapped() + num_reused(), 0);
  void* const raw = c10::GetCPUAllocator()->raw_allocate(100);
  c10::GetCPUAllocator()->raw_deallocate(raw);
  void* const large = c10::GetCPUAllocator()->raw_allocate(4 * kMiB);
  EXPECT_EQ(live(), 4 * kMiB);
  c10::GetCPUAllocator()->raw_deallocate(large);
  EXPECT_EQ(live(), 0);
}

TEST_F(HostAllocation, other_sizes_take_no_more_than_was_in_use_at_one_time) {
  const int64_t resident = resident_bytes();
  for (const int64_t size : {32, 20, 12, 28, 32}) {
    const at::Tensor tensor = filled(size);
    EXPECT_LE(live() + cached(), 36 * kMiB) << size;
    EXPECT_LT(resident_bytes() - resident, 38 * kMiB) << size;
  }
}

TEST_F(HostAllocation, what_two_steps_have_not_used_goes_back) {
  {
    const std::vector<at::Tensor> first = {filled(40), filled(8), filled(8)};
  }
  for (int step = 0; step < 6; ++step) {
    {
      const at::Tensor tensor = filled(8);
      const at::Tensor other = filled(8);
    }
    allocator_.release_idle();
    EXPECT_EQ(cached(), step < 2 ? 56 * kMiB : 16 * kMiB) << step;
    // A second update of the step: nothing has been used since the first one.
    if (step > 3) allocator_.release_idle();
  }
  EXPECT_EQ(num_mapped(), 3);
}

TEST_F(HostAllocation, all_goes_back_when_it_is_asked_to) {
  const int64_t resident = resident_bytes();
  const at::Tensor stays = filled(4, 3);
  {
    const std::vector<at::Tensor> go = {filled(30), filled(10), filled(10)};
  }
  EXPECT_GT(resident_bytes() - resident, 50 * kMiB);
  allocator_.release_all();
  EXPECT_EQ(cached(), 0);
  EXPECT_LT(resident_bytes() - resident, 8 * kMiB);
  EXPECT_EQ(stays[4 * kMiB - 1].item<int>(), 3);
}

// The heap would keep holes below objects that stay.
TEST_F(HostAllocation, objects_that_stay_do_not_hold_what_was_before_them) {
  const int64_t resident = resident_bytes();
  std::vector<at::Tensor> stay;
  for (int i = 0; i < 16; ++i) {
    filled(5);
    stay.push_back(at::full({5000}, 1, at::kByte));
  }
  EXPECT_LT(resident_bytes() - resident, 8 * kMiB);
}

TEST_F(HostAllocation, tensors_outlive_the_installation) {
  at::Tensor tensor = filled(6, 2);
  allocator_.uninstall();
  EXPECT_NE(c10::GetCPUAllocator(), &allocator_);
  EXPECT_EQ(tensor[0].item<int>(), 2);
  filled(9);
  EXPECT_EQ(num_mapped(), 1);
  tensor.reset();
  EXPECT_EQ(live(), 0);
  EXPECT_EQ(cached(), 0) << "nobody would use it again";
}

TEST_F(HostAllocation, threads_share_it) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 20; ++i) {
        const at::Tensor tensor = filled(2 + t % 2, t + 1);
        EXPECT_EQ(tensor[i].item<int>(), t + 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(live(), 0);
  EXPECT_LE(num_mapped(), 8);
}

// Loaders of data are forked while other threads are at work.
TEST_F(HostAllocation, a_forked_child_can_use_it) {
  std::atomic<bool> goes_on = true;
  std::thread busy([&] {
    while (goes_on) at::empty({2 * kMiB}, at::kByte);
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      const at::Tensor tensor = at::empty({3 * kMiB}, at::kByte);
      ::_exit(tensor.defined() ? 7 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  }
  goes_on = false;
  busy.join();
}

}  // namespace
}  // namespace smp::memory
