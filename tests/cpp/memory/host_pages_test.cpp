#include "csrc/memory/host_pages.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>
#include <cstring>
#include <vector>

#include "csrc/common/check.h"
#include "tests/cpp/memory/resident_bytes.h"

namespace smp::memory {
namespace {

TEST(HostPages, memory_comes_with_its_use_and_goes_at_once) {
  for (const int64_t num_bytes : {kMiB, 9 * kMiB + 12345, 64 * kMiB}) {
    const int64_t before = resident_bytes();
    at::DataPtr pages = take_pages(num_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(pages.get()) % 4096, 0u);
    auto* const bytes = static_cast<char*>(pages.get());
    EXPECT_EQ(bytes[0], 0);
    EXPECT_EQ(bytes[num_bytes - 1], 0);
    std::memset(bytes, 1, static_cast<size_t>(num_bytes));
    EXPECT_GE(resident_bytes() - before, num_bytes * 9 / 10);
    pages.clear();
    EXPECT_LT(resident_bytes() - before, kMiB / 2) << num_bytes;
  }
}

// The heap would keep a free block below a block that stays.
TEST(HostPages, a_tensor_that_stays_does_not_hold_what_was_before_it) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has memory of its own for each page";
#endif
  const int64_t before = resident_bytes();
  std::vector<at::Tensor> stay;
  for (int i = 0; i < 8; ++i) {
    at::Tensor goes = empty_in_pages(8 * kMiB, at::kByte);
    std::memset(goes.mutable_data_ptr(), 1, goes.nbytes());
    stay.push_back(at::empty({kMiB / 2}, at::kByte));
    std::memset(stay.back().mutable_data_ptr(), 1, kMiB / 2);
  }
  EXPECT_LT(resident_bytes() - before, 10 * kMiB);
}

TEST(HostPages, small_tensors_are_ordinary_ones) {
  const at::Tensor small = empty_in_pages(100, at::kDouble);
  EXPECT_EQ(small.numel(), 100);
  EXPECT_EQ(small.scalar_type(), at::kDouble);
  const at::Tensor large = empty_in_pages(kMiB, at::kDouble);
  EXPECT_EQ(large.sizes(), at::IntArrayRef({kMiB}));
  EXPECT_EQ(large.storage().nbytes(), static_cast<size_t>(8 * kMiB));
  EXPECT_TRUE(large.is_contiguous());
}

TEST(HostPages, zeros_take_memory_when_they_are_written) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has memory of its own for each page";
#endif
  const int64_t before = resident_bytes();
  const at::Tensor zeros = zeros_in_pages(16 * kMiB, at::kFloat);
  EXPECT_LT(resident_bytes() - before, kMiB);
  std::memset(zeros.mutable_data_ptr(), 1, zeros.nbytes() / 2);
  EXPECT_GT(resident_bytes() - before, 31 * kMiB);
  const float* const values = zeros.const_data_ptr<float>();
  EXPECT_EQ(values[zeros.numel() - 1], 0);
  const at::Tensor small = zeros_in_pages(100, at::kDouble);
  EXPECT_EQ(small.scalar_type(), at::kDouble);
  EXPECT_EQ(small.const_data_ptr<double>()[99], 0);
}

TEST(HostPages, more_than_there_is_raises) {
  EXPECT_THROW(take_pages(int64_t{1} << 60), Error);
}

}  // namespace
}  // namespace smp::memory
