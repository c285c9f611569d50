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

  /// As `abandon`.
  ~FileWriter();

  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  /// Copies `bytes` behind what came before; waits when all buffers are full.
  /// @throws Error what the writing thread met (a full disk, say), with the
  ///         name of the file
  void append(std::span<const std::byte> bytes);

  /// The same without a copy, where `bytes` are many: they are written from
  /// where they are, and must not change before `finish` returns. `owner` is
  /// held until then, and of what it owns no more than the size of the buffers
  /// is still to be written when the call returns.
  void append_borrowed(std::span<const std::byte> bytes,
                       std::shared_ptr<const void> owner);

  /// Room in the current buffer, at least one byte: for code that makes bytes
  /// in place. Throws as `append`.
  std::span<std::byte> room();

  /// The first `count` bytes of `room()` have been filled.
  void advance(size_t count);

  /// The CRC-32 of what came since the last call.
  uint32_t take_crc32() { return checksums_.take_record(); }

  /// Waits until everything is on the disk (fsync) and closes the file.
  /// @throws Error as `append`, and when called twice
  FileRecord finish();

  /// Stops early and closes the file, which stays as it is. For a write that
  /// failed; does nothing after `finish`.
  void abandon() noexcept;

  /// Bytes appended so far.
  int64_t position() const { return position_; }

  /// Bytes handed to the operating system so far: progress.
  int64_t bytes_written() const { return bytes_written_; }

 private:
  struct Buffer {
    std::unique_ptr<std::byte[]> bytes;
    size_t size = 0;
  };

  /// What the thread is to write: a buffer, or what somebody else owns.
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
  bool abandoned_ = false;      // what is full need not be written
  std::string error_;

  std::thread thread_;  // joined by stop()
};

}  // namespace smp::checkpoint
