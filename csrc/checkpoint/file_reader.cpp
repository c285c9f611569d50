#include "csrc/checkpoint/file_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "csrc/checkpoint/crc32.h"
#include "csrc/common/check.h"

namespace smp::checkpoint {

FileReader::FileReader(std::string path, FileRecord record)
    : path_(std::move(path)), record_(std::move(record)) {
  SMP_CHECK_VALUE(record_.chunk_bytes > 0 && record_.num_bytes >= 0 &&
                      static_cast<int64_t>(record_.crc32s.size()) ==
                          (record_.num_bytes + record_.chunk_bytes - 1) /
                              record_.chunk_bytes,
                  path_, ": ", record_.crc32s.size(),
                  " checksums of chunks of ", record_.chunk_bytes,
                  " bytes do not make ", record_.num_bytes, " bytes");
  // Opening a FIFO without a writer must not block.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  SMP_CHECK(fd_ >= 0, "cannot open ", path_, ": ",
            std::generic_category().message(errno));
  struct stat status{};
  const bool known = ::fstat(fd_, &status) == 0 && S_ISREG(status.st_mode);
  if (!known || status.st_size != record_.num_bytes) {
    ::close(fd_);
    SMP_CHECK(known, path_, ": expected a regular file of ", record_.num_bytes,
              " bytes, it is something else");
    SMP_CHECK(false, path_, " has ", status.st_size,
              " bytes, but the manifest says ", record_.num_bytes,
              ": the file was cut off or replaced");
  }
}

FileReader::~FileReader() { ::close(fd_); }

void FileReader::read(int64_t offset, std::span<std::byte> into) {
  const int64_t count = static_cast<int64_t>(into.size());
  SMP_CHECK_VALUE(offset >= 0 && offset <= record_.num_bytes - count, path_,
                  " has ", record_.num_bytes, " bytes; bytes [", offset, ", ",
                  offset + count, ") were asked for");
  std::lock_guard lock(mutex_);
  while (!into.empty()) {
    const int64_t idx = offset / record_.chunk_bytes;
    const Chunk at = chunk(idx);
    const int64_t end =
        std::min(at.end, offset + static_cast<int64_t>(into.size()));
    const size_t length = static_cast<size_t>(end - offset);
    if (offset == at.begin && end == at.end) {
      read_chunk(idx, into.data());
    } else {
      if (kept_idx_ != idx) {
        kept_.resize(static_cast<size_t>(at.end - at.begin));
        kept_idx_ = -1;
        read_chunk(idx, kept_.data());
        kept_idx_ = idx;
      }
      std::memcpy(into.data(), kept_.data() + (offset - at.begin), length);
    }
    offset = end;
    into = into.subspan(length);
  }
}

FileReader::Chunk FileReader::chunk(int64_t idx) const {
  const int64_t begin = idx * record_.chunk_bytes;
  return {begin, std::min(begin + record_.chunk_bytes, record_.num_bytes)};
}

void FileReader::read_chunk(int64_t idx, std::byte* into) {
  const Chunk at = chunk(idx);
  for (int64_t offset = at.begin; offset < at.end;) {
    const ssize_t count = ::pread(fd_, into + (offset - at.begin),
                                  static_cast<size_t>(at.end - offset), offset);
    if (count < 0 && errno == EINTR) continue;
    SMP_CHECK(count >= 0, "cannot read ", path_, " at byte ", offset, ": ",
              std::generic_category().message(errno));
    SMP_CHECK(count > 0, path_, " ends at byte ", offset,
              ", while it is being read: it was cut off");
    offset += count;
  }
  const uint32_t crc = crc32({into, static_cast<size_t>(at.end - at.begin)});
  SMP_CHECK(crc == record_.crc32s[idx], path_, ": bytes [", at.begin, ", ",
            at.end, ") do not have the checksum of the manifest (", crc,
            ", not ", record_.crc32s[idx],
            "): the file is damaged or was changed; `smp ckpt verify` checks "
            "all files of the folder");
}

}  // namespace smp::checkpoint
