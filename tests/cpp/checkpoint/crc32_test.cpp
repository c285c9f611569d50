#include "csrc/checkpoint/crc32.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "csrc/checkpoint/stream_checksums.h"

namespace smp::checkpoint {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST(Crc32, HasTheCheckValueOfTheZipFormat) {
  EXPECT_EQ(crc32(as_bytes("123456789")), 0xCBF43926u);
  EXPECT_EQ(crc32_by_table(as_bytes("123456789")), 0xCBF43926u);
  EXPECT_EQ(crc32({}), 0u);
}

TEST(Crc32, HardwareEqualsTheTableAtEveryLengthAndAlignment) {
  const Bytes bytes = random_bytes(700, 1);
  for (size_t begin = 0; begin < 17; ++begin) {
    for (size_t count = 0; begin + count <= bytes.size(); ++count) {
      const auto piece = std::span(bytes).subspan(begin, count);
      ASSERT_EQ(crc32(piece), crc32_by_table(piece)) << begin << " " << count;
      ASSERT_EQ(crc32(piece, 12345), crc32_by_table(piece, 12345));
    }
  }
}

TEST(Crc32, SumsOfPiecesCombine) {
  const Bytes bytes = random_bytes(100000, 2);
  const auto all = std::span<const std::byte>(bytes);
  for (const size_t cut : {0, 1, 63, 64, 4096, 77777, 100000}) {
    EXPECT_EQ(crc32_combine(crc32(all.first(cut)), crc32(all.subspan(cut)),
                            bytes.size() - cut),
              crc32(all));
    EXPECT_EQ(crc32(all.subspan(cut), crc32(all.first(cut))), crc32(all));
  }
}

TEST(StreamChecksums, ChunksAndRecordsOfOnePass) {
  const Bytes bytes = random_bytes(10000, 3);
  const auto all = std::span<const std::byte>(bytes);
  std::mt19937 random(4);
  for (const int64_t chunk_bytes : {1, 7, 1000, 2500, 10000, 20000}) {
    StreamChecksums sums(chunk_bytes);
    size_t at = 0;
    size_t record_begin = 0;
    while (at < all.size()) {
      const size_t count =
          std::min<size_t>(1 + random() % 1500, all.size() - at);
      sums.add(all.subspan(at, count));
      at += count;
      if (random() % 3 == 0) {
        ASSERT_EQ(sums.take_record(),
                  crc32(all.subspan(record_begin, at - record_begin)));
        record_begin = at;
      }
    }
    const auto chunks = sums.finish();
    ASSERT_EQ(chunks.size(), (all.size() + chunk_bytes - 1) / chunk_bytes);
    for (size_t i = 0; i < chunks.size(); ++i) {
      const size_t begin = i * chunk_bytes;
      ASSERT_EQ(chunks[i],
                crc32(all.subspan(
                    begin, std::min<size_t>(chunk_bytes, all.size() - begin))));
    }
  }
}

}  // namespace
}  // namespace smp::checkpoint
