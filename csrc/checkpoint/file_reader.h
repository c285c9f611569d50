#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "csrc/checkpoint/file_record.h"

namespace smp::checkpoint {

/// Reads ranges of a file and checks every chunk that they lie in. Whole chunks
/// are read in place; of other chunks the last one is kept (`chunk_bytes` of
/// memory), so that ascending small reads read each chunk once. Any thread may
/// call; one reads at a time.
class FileReader {
 public:
  /// @throws Error naming the file, if it cannot be opened or its size differs
  FileReader(std::string path, FileRecord record);
  ~FileReader();

  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  /// Reads the bytes from `offset` on.
  /// @throws ValueError if the file ends before
  /// @throws Error naming file and offset, if it cannot be read or a checksum
  ///         differs
  void read(int64_t offset, std::span<std::byte> into);

  const std::string& path() const { return path_; }

 private:
  struct Chunk {
    int64_t begin;
    int64_t end;
  };

  Chunk chunk(int64_t idx) const;
  void read_chunk(int64_t idx, std::byte* into);

  const std::string path_;
  const FileRecord record_;
  int fd_ = -1;
  std::mutex mutex_;  // guards what follows
  std::vector<std::byte> kept_;
  int64_t kept_idx_ = -1;
};

}  // namespace smp::checkpoint
