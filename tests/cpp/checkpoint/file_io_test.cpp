#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "csrc/checkpoint/crc32.h"
#include "csrc/checkpoint/file_reader.h"
#include "csrc/checkpoint/file_writer.h"
#include "csrc/common/check.h"

namespace smp::checkpoint {
namespace {

using Bytes = std::vector<std::byte>;

class FileIo : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("smp_file_io_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ / name; }

  Bytes contents(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
    return {bytes.begin(), bytes.end()};
  }

  FileRecord write(const std::string& name, const Bytes& bytes,
                   int64_t chunk_bytes) const {
    FileWriter writer(path(name), {4096, 2, chunk_bytes});
    writer.append(bytes);
    return writer.finish();
  }

  std::filesystem::path folder_;
};

Bytes random_contents(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

template <typename Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST_F(FileIo, WritesWhatWasAppendedInPiecesOfAnySize) {
  const Bytes bytes = random_contents(300000, 5);
  std::mt19937 random(6);
  for (const int num_buffers : {1, 2, 3}) {
    FileWriter writer(path("a"), {10000, num_buffers, 7777});
    size_t at = 0;
    while (at < bytes.size()) {
      const size_t count =
          std::min<size_t>(1 + random() % 40000, bytes.size() - at);
      writer.append(std::span(bytes).subspan(at, count));
      at += count;
      ASSERT_EQ(writer.position(), static_cast<int64_t>(at));
      ASSERT_LE(writer.bytes_written(), writer.position());
    }
    const FileRecord record = writer.finish();
    EXPECT_EQ(record.num_bytes, 300000);
    EXPECT_EQ(record.crc32s.size(), 39u);
    EXPECT_EQ(record.crc32s[0], crc32(std::span(bytes).first(7777)));
    EXPECT_EQ(writer.bytes_written(), 300000);
    EXPECT_EQ(contents("a"), bytes);
  }
}

TEST_F(FileIo, BorrowedBytesComeInTheirOrderAndAreLetGoOf) {
  const Bytes bytes = random_contents(400000, 15);
  std::mt19937 random(16);
  for (const int num_buffers : {1, 2}) {
    FileWriter writer(path("a"), {10000, num_buffers, 7777});
    size_t at = 0;
    size_t num_borrowed = 0;
    std::vector<std::weak_ptr<const void>> owners;
    while (at < bytes.size()) {
      const size_t count =
          std::min<size_t>(1 + random() % 60000, bytes.size() - at);
      const auto piece = std::span(bytes).subspan(at, count);
      if (random() % 2 == 0) {
        writer.append(piece);
      } else {
        const auto owner =
            std::make_shared<const Bytes>(piece.begin(), piece.end());
        writer.append_borrowed(*owner, owner);
        owners.push_back(owner);
        // A piece larger than the buffers has been written already.
        EXPECT_TRUE(count <= 10000u * num_buffers || owner.use_count() == 1);
        ++num_borrowed;
      }
      at += count;
      ASSERT_EQ(writer.position(), static_cast<int64_t>(at));
    }
    const FileRecord record = writer.finish();
    EXPECT_GT(num_borrowed, 3u);
    EXPECT_EQ(contents("a"), bytes);
    EXPECT_EQ(record.crc32s.back(), crc32(std::span(bytes).subspan(51 * 7777)));
    for (const auto& owner : owners) EXPECT_TRUE(owner.expired());
  }
}

TEST_F(FileIo, AFullDiskEndsABorrowedWrite) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  const auto owner = std::make_shared<const Bytes>(random_contents(90000, 17));
  {
    FileWriter writer("/dev/full", {4096, 2, 4096});
    const std::string error =
        error_of([&] { writer.append_borrowed(*owner, owner); });
    EXPECT_NE(error.find("No space left"), std::string::npos) << error;
    EXPECT_THROW(writer.append(*owner), Error);
  }
  EXPECT_EQ(owner.use_count(), 1);
}

TEST_F(FileIo, AnEmptyFileHasNoChunks) {
  const FileRecord record = write("empty", {}, 100);
  EXPECT_EQ(record.num_bytes, 0);
  EXPECT_TRUE(record.crc32s.empty());
  FileReader reader(path("empty"), record);
  reader.read(0, {});
  EXPECT_THROW(reader.read(1, {}), ValueError);
}

TEST_F(FileIo, AFullDiskIsAnErrorThatNamesTheFile) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  const Bytes bytes = random_contents(50000, 7);
  FileWriter writer("/dev/full", {4096, 2, 4096});
  const std::string error = error_of([&] {
    writer.append(bytes);
    writer.finish();
  });
  EXPECT_NE(error.find("/dev/full"), std::string::npos) << error;
  EXPECT_NE(error.find("No space left"), std::string::npos) << error;
}

TEST_F(FileIo, AnErrorOfTheLastBufferReachesFinish) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  FileWriter writer("/dev/full", {4096, 2, 4096});
  writer.append(random_contents(100, 8));  // stays in the buffer
  EXPECT_NE(error_of([&] { writer.finish(); }).find("No space left"),
            std::string::npos);
}

TEST_F(FileIo, AFileThatGrowsTooLargeKeepsItsBeginning) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  rlimit small = old;
  small.rlim_cur = 20000;
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string error =
      error_of([&] { write("big", random_contents(90000, 9), 4096); });
  setrlimit(RLIMIT_FSIZE, &old);
  EXPECT_NE(error.find("big"), std::string::npos) << error;
  EXPECT_NE(error.find("File too large"), std::string::npos) << error;
}

TEST_F(FileIo, AnAbandonedWriterStopsAndCannotGoOn) {
  FileWriter writer(path("a"), {4096, 2, 4096});
  writer.append(random_contents(100000, 10));
  writer.abandon();
  writer.abandon();
  EXPECT_THROW(writer.append(random_contents(10, 1)), Error);
  EXPECT_THROW(writer.finish(), Error);
}

TEST_F(FileIo, AFolderThatIsMissingIsNamed) {
  const std::string error =
      error_of([&] { FileWriter(path("none/a"), {4096, 2, 4096}); });
  EXPECT_NE(error.find("none/a"), std::string::npos) << error;
  EXPECT_NE(error.find("No such file"), std::string::npos) << error;
}

TEST_F(FileIo, ReadsAnyRange) {
  const Bytes bytes = random_contents(20000, 11);
  const FileRecord record = write("a", bytes, 999);
  FileReader reader(path("a"), record);
  std::mt19937 random(12);
  for (int round = 0; round < 500; ++round) {
    const size_t begin = random() % (bytes.size() + 1);
    const size_t count = random() % (bytes.size() - begin + 1);
    Bytes into(count);
    reader.read(static_cast<int64_t>(begin), into);
    ASSERT_TRUE(std::equal(into.begin(), into.end(), bytes.begin() + begin));
  }
}

TEST_F(FileIo, AFlippedByteIsNoticedByWhoReadsItsChunk) {
  const Bytes bytes = random_contents(5000, 13);
  const FileRecord record = write("a", bytes, 1000);
  for (const int64_t flipped : {0, 999, 1000, 3456, 4999}) {
    Bytes damaged = bytes;
    damaged[flipped] ^= std::byte{0x10};
    std::ofstream(path("a"), std::ios::binary)
        .write(reinterpret_cast<const char*>(damaged.data()), 5000);
    FileReader reader(path("a"), record);
    const int64_t chunk = flipped / 1000;
    for (int64_t other = 0; other < 5; ++other) {
      Bytes into(10);
      const auto read = [&] { reader.read(other * 1000 + 500, into); };
      if (other != chunk) {
        EXPECT_EQ(error_of(read), "");
        continue;
      }
      const std::string error = error_of(read);
      EXPECT_NE(error.find(path("a")), std::string::npos) << error;
      EXPECT_NE(error.find(std::to_string(chunk * 1000)), std::string::npos);
    }
    Bytes whole(5000);
    EXPECT_NE(error_of([&] { reader.read(0, whole); }), "");
  }
}

TEST_F(FileIo, AFileOfAnotherSizeIsRefused) {
  const FileRecord record = write("a", random_contents(5000, 14), 1000);
  std::filesystem::resize_file(path("a"), 4999);
  const std::string error = error_of([&] { FileReader(path("a"), record); });
  EXPECT_NE(error.find("4999"), std::string::npos) << error;
  EXPECT_NE(error.find("5000"), std::string::npos) << error;
  EXPECT_THROW(FileReader(path("b"), record), Error);
  EXPECT_THROW(FileReader(path("a"), (FileRecord{5000, 1000, {1, 2}})),
               ValueError);
}

}  // namespace
}  // namespace smp::checkpoint
