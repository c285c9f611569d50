#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "csrc/checkpoint/file_record.h"
#include "csrc/checkpoint/stream_checksums.h"

namespace smp::checkpoint {

struct FileWriterOptions {
  int64_t buffer_bytes = 32 << 20;
  int num_buffers = 2;
  int64_t chunk_bytes = 4 << 20;
};

/// Writes a file from front to back: the caller fills one buffer while a thread
/// writes another. Memory is `num_buffers * buffer_bytes` whatever the size of
/// the file; large pieces of memory are written without a copy. One thread
/// calls; any thread may read `bytes_written`.
class FileWriter {
 public:
  /// Creates or truncates `path`.
  /// @throws ValueError for options that are no sizes
  /// @throws Error naming the file
  FileWriter(std::string path, FileWriterOptions options);

  /// Stops as `abandon` does.
  ~FileWriter();

  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  /// Copies `bytes` behind earlier ones; waits when all buffers are full.
  /// @throws Error with the error of the writing thread (a full disk, say) and
  ///     the name of the file
  void append(std::span<const std::byte> bytes);

  /// Appends without a copy, where `bytes` are many: they are written from
  /// their place, and must not change before `finish` returns. `owner` is held
  /// until then. When the call returns, no more of the owner's bytes than the
  /// size of the buffers is still to be written.
  void append_borrowed(std::span<const std::byte> bytes,
                       std::shared_ptr<const void> owner);

  /// Returns room in the current buffer, at least one byte: for code that makes
  /// bytes in place. Throws as `append`.
  std::span<std::byte> room();

  /// Appends the first `count` bytes of `room()`, which have been filled.
  void advance(size_t count);

  /// Returns the CRC-32 of the bytes since the last call.
  uint32_t take_crc32() { return checksums_.take_record(); }

  /// Waits until everything is on the disk (fsync) and closes the file.
  /// @throws Error as `append`, and when called twice
  FileRecord finish();

  /// Stops early and closes the file, which stays unfinished. For a write that
  /// failed; does nothing after `finish`.
  void abandon() noexcept;

  /// Returns the bytes appended so far.
  int64_t position() const { return position_; }

  /// Returns the bytes handed to the operating system so far: progress.
  int64_t bytes_written() const { return bytes_written_; }

 private:
  struct Buffer {
    std::unique_ptr<std::byte[]> bytes;
    size_t size = 0;
  };

  /// Work for the thread: a buffer, or memory of another owner.
  struct Item {
    int buffer_idx = -1;
    std::span<const std::byte> bytes;
    std::shared_ptr<const void> owner;
  };

  void write_items();
  void write_all(std::span<const std::byte> bytes);
  void submit();
  void submit_borrowed(std::span<const std::byte> bytes,
                       const std::shared_ptr<const void>& owner);
  int64_t budget() const;
  void check_error();
  void stop();

  const std::string path_;
  const FileWriterOptions options_;
  int fd_ = -1;
  int64_t position_ = 0;
  StreamChecksums checksums_;
  std::vector<Buffer> buffers_;
  int current_ = -1;  // the buffer that is being filled, -1: none
  std::atomic<int64_t> bytes_written_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<int> free_;
  std::deque<Item> full_;
  int64_t borrowed_bytes_ = 0;  // of `full_`
  bool ending_ = false;         // no more buffers come
  bool abandoned_ = false;      // full buffers need not be written
  std::string error_;

  std::thread thread_;  // joined by stop()
};

}  // namespace smp::checkpoint
