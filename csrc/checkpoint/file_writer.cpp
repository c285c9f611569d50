#include "csrc/checkpoint/file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/without_gil.h"

namespace smp::checkpoint {

namespace {

// A piece is copied and then summed while it is in the cache of the core.
constexpr size_t kPieceBytes = 128 << 10;
// Pieces below this fraction of a buffer are copied: a write of their own would
// cost more.
constexpr int64_t kBorrowFraction = 32;

}  // namespace

FileWriter::FileWriter(std::string path, FileWriterOptions options)
    : path_(std::move(path)),
      options_(options),
      checksums_(options.chunk_bytes) {
  SMP_CHECK_VALUE(options_.buffer_bytes > 0 && options_.num_buffers > 0 &&
                      options_.chunk_bytes > 0,
                  "cannot write ", path_, " with ", options_.num_buffers,
                  " buffers of ", options_.buffer_bytes,
                  " bytes and chunks of ", options_.chunk_bytes,
                  "; all must be positive");
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  SMP_CHECK(fd_ >= 0, "cannot create ", path_, ": ",
            std::generic_category().message(errno));
  buffers_.resize(options_.num_buffers);
  for (int i = 0; i < options_.num_buffers; ++i) free_.push_back(i);
  thread_ = std::thread([this] { write_items(); });
}

FileWriter::~FileWriter() { abandon(); }

void FileWriter::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto into = room();
    const size_t count = std::min({into.size(), bytes.size(), kPieceBytes});
    std::memcpy(into.data(), bytes.data(), count);
    advance(count);
    bytes = bytes.subspan(count);
  }
}

void FileWriter::append_borrowed(std::span<const std::byte> bytes,
                                 std::shared_ptr<const void> owner) {
  if (static_cast<int64_t>(bytes.size()) <
      options_.buffer_bytes / kBorrowFraction) {
    append(bytes);
    return;
  }
  SMP_CHECK(thread_.joinable(), path_, " is closed already");
  if (current_ >= 0) submit();
  const bool outlives = static_cast<int64_t>(bytes.size()) <= budget();
  const size_t limit = static_cast<size_t>(options_.buffer_bytes);
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), limit));
    submit_borrowed(piece, owner);
    checksums_.add(piece);  // while the thread writes it
    position_ += static_cast<int64_t>(piece.size());
    bytes = bytes.subspan(piece.size());
  }
  if (outlives) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return borrowed_bytes_ == 0 || !error_.empty(); });
  check_error();
}

void FileWriter::submit_borrowed(std::span<const std::byte> bytes,
                                 const std::shared_ptr<const void>& owner) {
  const int64_t count = static_cast<int64_t>(bytes.size());
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      return borrowed_bytes_ + count <= budget() || !error_.empty();
    });
    check_error();
    borrowed_bytes_ += count;
    full_.push_back({-1, bytes, owner});
  }
  changed_.notify_all();
}

int64_t FileWriter::budget() const {
  return options_.num_buffers * options_.buffer_bytes;
}

std::span<std::byte> FileWriter::room() {
  SMP_CHECK(thread_.joinable(), path_, " is closed already");
  const size_t size = static_cast<size_t>(options_.buffer_bytes);
  if (current_ < 0) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !free_.empty() || !error_.empty(); });
    check_error();
    current_ = free_.front();
    free_.pop_front();
  }
  Buffer& buffer = buffers_[current_];
  // Small files never touch the second buffer.
  if (!buffer.bytes)
    buffer.bytes = std::make_unique_for_overwrite<std::byte[]>(size);
  return {buffer.bytes.get() + buffer.size, size - buffer.size};
}

void FileWriter::advance(size_t count) {
  Buffer& buffer = buffers_[current_];
  checksums_.add({buffer.bytes.get() + buffer.size, count});
  buffer.size += count;
  position_ += static_cast<int64_t>(count);
  if (buffer.size == static_cast<size_t>(options_.buffer_bytes)) submit();
}

void FileWriter::submit() {
  {
    std::lock_guard lock(mutex_);
    const Buffer& buffer = buffers_[current_];
    full_.push_back({current_, {buffer.bytes.get(), buffer.size}, nullptr});
    current_ = -1;
  }
  changed_.notify_all();
}

FileRecord FileWriter::finish() {
  SMP_CHECK(thread_.joinable(), path_, " is closed already");
  if (current_ >= 0) submit();
  stop();
  if (error_.empty() && ::fsync(fd_) != 0) {
    error_ = detail::concat("cannot write ", path_, " to the disk: ",
                            std::generic_category().message(errno));
  }
  if (::close(std::exchange(fd_, -1)) != 0 && error_.empty()) {
    error_ = detail::concat("cannot close ", path_, ": ",
                            std::generic_category().message(errno));
  }
  check_error();
  return {position_, options_.chunk_bytes, checksums_.finish()};
}

void FileWriter::abandon() noexcept {
  if (thread_.joinable()) {
    {
      std::lock_guard lock(mutex_);
      abandoned_ = true;
    }
    without_gil([this] { stop(); });
  }
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void FileWriter::stop() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  full_.clear();  // drops what a failed write has left
}

void FileWriter::check_error() { SMP_CHECK(error_.empty(), error_); }

void FileWriter::write_items() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || !full_.empty(); });
    if (full_.empty() || abandoned_) return;
    Item item = std::move(full_.front());
    full_.pop_front();
    lock.unlock();
    std::string error;
    try {
      write_all(item.bytes);
    } catch (const Error& e) {
      error = e.what();
    }
    item.owner.reset();
    lock.lock();
    if (item.buffer_idx >= 0) {
      buffers_[item.buffer_idx].size = 0;
      free_.push_back(item.buffer_idx);
    } else {
      borrowed_bytes_ -= static_cast<int64_t>(item.bytes.size());
    }
    error_ = std::move(error);
    changed_.notify_all();
    if (!error_.empty()) return;
  }
}

void FileWriter::write_all(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      throw Error(detail::concat(
          "cannot write ", path_, " beyond ", bytes_written_.load(), " bytes: ",
          std::generic_category().message(count < 0 ? errno : EIO)));
    }
    // Otherwise the disk would be idle until fsync, as long as the kernel
    // tolerates the dirty pages.
    ::sync_file_range(fd_, bytes_written_, count, SYNC_FILE_RANGE_WRITE);
    bytes_written_ += count;
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

}  // namespace smp::checkpoint
