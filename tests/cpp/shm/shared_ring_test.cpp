#include "csrc/shm/shared_ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "csrc/common/check.h"

namespace smp::shm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Seat = Doorbell::Seat;

// A ring whose two ends belong to this process.
struct Ring {
  explicit Ring(size_t capacity)
      : data(capacity),
        memory{&control, data.data(), capacity},
        writer(memory, &reader_bell),
        reader(memory, &writer_bell) {}

  RingControl control;
  std::vector<uint8_t> data;
  RingMemory memory;
  Doorbell reader_bell;
  Doorbell writer_bell;
  RingWriter writer;
  RingReader reader;
};

uint8_t byte_at(size_t position) {
  return static_cast<uint8_t>(position * 2654435761u >> 13);
}

std::vector<uint8_t> bytes_from(size_t position, size_t size) {
  std::vector<uint8_t> result(size);
  for (size_t i = 0; i < size; ++i) result[i] = byte_at(position + i);
  return result;
}

TEST(SharedRing, BytesAreSeenOnlyOncePublished) {
  Ring ring(16);
  const auto bytes = bytes_from(0, 5);
  EXPECT_EQ(ring.writer.write(bytes.data(), 5), 5u);
  EXPECT_FALSE(ring.reader.has_more());
  ring.writer.publish();
  EXPECT_TRUE(ring.reader.has_more());
  std::vector<uint8_t> got(5);
  EXPECT_EQ(ring.reader.read(got.data(), 5), 5u);
  EXPECT_EQ(got, bytes);
  EXPECT_FALSE(ring.reader.has_more());
}

TEST(SharedRing, WrapsAroundWithPiecesOfAnySize) {
  for (const size_t capacity : {1, 2, 7, 64, 1000}) {
    Ring ring(capacity);
    std::mt19937 random(static_cast<unsigned>(capacity));
    size_t written = 0;
    size_t read = 0;
    while (read < 20 * capacity + 500) {
      const auto bytes = bytes_from(written, random() % (capacity + 2));
      const size_t free = capacity - (written - read);
      const size_t taken = ring.writer.write(bytes.data(), bytes.size());
      EXPECT_EQ(taken, std::min(free, bytes.size()));
      written += taken;
      ring.writer.publish();
      std::vector<uint8_t> got(random() % (capacity + 2));
      const size_t size = ring.reader.read(got.data(), got.size());
      EXPECT_EQ(size, std::min(got.size(), written - read));
      got.resize(size);
      ASSERT_EQ(got, bytes_from(read, size));
      read += size;
    }
  }
}

TEST(SharedRing, WriterIsRungWhenHalfIsFree) {
  Ring ring(100);
  const auto bytes = bytes_from(0, 100);
  ring.writer.write(bytes.data(), 90);
  EXPECT_FALSE(ring.writer.must_wait());
  ring.writer.write(bytes.data() + 90, 10);
  ring.writer.publish();
  uint32_t seen = ring.writer_bell.prepare();
  EXPECT_TRUE(ring.writer.must_wait());
  std::vector<uint8_t> got(100);
  auto is_rung = [&] { return ring.writer_bell.watch(Seat::kFirst) != seen; };
  ring.reader.read(got.data(), 49);
  EXPECT_FALSE(is_rung());
  seen = ring.writer_bell.prepare();
  ring.reader.read(got.data(), 1);
  EXPECT_TRUE(is_rung());
  EXPECT_FALSE(ring.writer.must_wait());
}

TEST(SharedRing, SenselessPositionsAreErrors) {
  Ring ring(16);
  uint8_t byte = 0;
  ring.control.written = 17;
  EXPECT_THROW(ring.reader.read(&byte, 1), Error);
  const auto bytes = bytes_from(0, 16);
  ring.writer.write(bytes.data(), 16);
  ring.control.read = 20;  // more than was written
  EXPECT_THROW(ring.writer.write(&byte, 1), Error);
}

TEST(Doorbell, RingBetweenPrepareAndSleepIsNotLost) {
  Doorbell bell;
  const uint32_t seen = bell.prepare();
  bell.ring();
  bell.sleep(Seat::kFirst, seen);  // for ever if it were
}

TEST(Doorbell, RingWithoutASleeperIsNotKept) {
  Doorbell bell;
  bell.ring();
  const uint32_t seen = bell.prepare();
  const auto begin = std::chrono::steady_clock::now();
  bell.sleep(Seat::kFirst, seen, milliseconds(20));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(19));
}

TEST(Doorbell, ARingReachesTheRegisteredSeatOnly) {
  Doorbell bell;
  const uint32_t first = bell.prepare(Seat::kFirst);
  const uint32_t second = bell.prepare(Seat::kSecond);
  bell.ring();
  bell.sleep(Seat::kSecond, second);
  const auto begin = std::chrono::steady_clock::now();
  bell.sleep(Seat::kFirst, first, milliseconds(20));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(19));
}

TEST(Doorbell, ASeatIsRegisteredForTheThreadThatSleepsInIt) {
  Doorbell bell;
  std::thread sleeper(
      [&, seen = bell.watch(Seat::kFirst)] { bell.sleep(Seat::kFirst, seen); });
  bell.prepare(Seat::kSecond);
  bell.prepare(Seat::kFirst);  // in the name of the sleeper
  bell.ring();
  sleeper.join();
}

using Pause = std::function<void(std::mt19937&)>;

// Two threads that sleep at their doorbells when there is nothing to do.
void stream(size_t capacity, size_t total, size_t max_piece,
            const Pause& writer_pause, const Pause& reader_pause) {
  Ring ring(capacity);
  std::thread writer([&] {
    std::mt19937 random(1);
    size_t position = 0;
    while (position < total) {
      const size_t size =
          std::min<size_t>(1 + random() % max_piece, total - position);
      const auto bytes = bytes_from(position, size);
      size_t done = 0;
      while (done < size) {
        const size_t taken =
            ring.writer.write(bytes.data() + done, size - done);
        done += taken;
        ring.writer.publish();
        if (taken > 0) continue;
        const uint32_t seen = ring.writer_bell.prepare();
        if (ring.writer.must_wait()) {
          ring.writer_bell.sleep(Seat::kFirst, seen);
        } else {
          ring.writer_bell.cancel();
        }
      }
      position += size;
      writer_pause(random);
    }
  });
  std::mt19937 random(2);
  size_t position = 0;
  size_t num_wrong = 0;
  while (position < total) {
    std::vector<uint8_t> got(1 + random() % max_piece);
    const size_t size = ring.reader.read(got.data(), got.size());
    for (size_t i = 0; i < size; ++i) {
      if (got[i] != byte_at(position + i)) ++num_wrong;
    }
    position += size;
    reader_pause(random);
    if (size > 0) continue;
    const uint32_t seen = ring.reader_bell.prepare();
    if (ring.reader.has_more()) {
      ring.reader_bell.cancel();
    } else {
      ring.reader_bell.sleep(Seat::kFirst, seen);
    }
  }
  writer.join();
  EXPECT_EQ(num_wrong, 0u);
  EXPECT_FALSE(ring.reader.has_more());
}

void no_pause(std::mt19937&) {}

void now_and_then(std::mt19937& random) {
  if (random() % 16 == 0) std::this_thread::sleep_for(microseconds(20));
}

TEST(SharedRing, StreamOfSmallPiecesArrives) {
  stream(4096, 2'000'000, 100, no_pause, no_pause);
}

TEST(SharedRing, StreamOfPiecesLargerThanTheRingArrives) {
  stream(1000, 2'000'000, 5000, no_pause, no_pause);
}

TEST(SharedRing, StreamOfASlowWriterArrives) {
  stream(1000, 200'000, 500, now_and_then, no_pause);
}

TEST(SharedRing, StreamToASlowReaderArrives) {
  stream(1000, 200'000, 500, no_pause, now_and_then);
}

TEST(SharedRing, StreamThroughOneByteArrives) {
  stream(1, 3000, 3, no_pause, no_pause);
}

}  // namespace
}  // namespace smp::shm
