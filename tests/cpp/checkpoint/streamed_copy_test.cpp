#include "csrc/checkpoint/streamed_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <random>
#include <span>
#include <vector>

namespace smp::checkpoint {
namespace {

using Bytes = std::vector<std::byte>;

constexpr size_t kMargin = 100;
constexpr std::byte kUntouched{0xA5};

Bytes random_bytes(size_t count) {
  std::mt19937 random(7);
  Bytes bytes(count);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// Copies at these distances from aligned memory, and looks beside the copy.
void check(size_t count, size_t from_offset, size_t to_offset) {
  const Bytes source = random_bytes(count + from_offset);
  Bytes target(count + to_offset + kMargin, kUntouched);
  const auto from = std::span(source).subspan(from_offset, count);
  copy_streamed(std::span(target).subspan(to_offset, count), from);
  const auto begin = target.begin() + static_cast<ptrdiff_t>(to_offset);
  const auto end = begin + static_cast<ptrdiff_t>(count);
  EXPECT_TRUE(std::equal(begin, end, from.begin()));
  const auto untouched = [](std::byte b) { return b == kUntouched; };
  EXPECT_TRUE(std::all_of(target.begin(), begin, untouched));
  EXPECT_TRUE(std::all_of(end, target.end(), untouched));
}

TEST(StreamedCopy, CopiesEveryLengthAndAlignment) {
  for (const size_t count :
       {size_t{0}, size_t{1}, size_t{4095}, (size_t{1} << 20) - 1,
        size_t{1} << 20, (size_t{1} << 20) + 16384 * 3 + 77,
        (size_t{3} << 20) + 4097}) {
    for (const size_t offset : {0, 1, 8, 63}) {
      SCOPED_TRACE(testing::Message() << count << " bytes at " << offset);
      check(count, offset, 0);
      check(count, 0, offset);
      check(count, offset, offset + 3);
    }
  }
}

}  // namespace
}  // namespace smp::checkpoint
