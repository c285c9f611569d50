#pragma once

#include <cstdint>
#include <vector>

namespace smp::checkpoint {

/// A file as the manifest describes it: its size, and the CRC-32 of each
/// `chunk_bytes` bytes (the last chunk may be shorter).
struct FileRecord {
  int64_t num_bytes = 0;
  int64_t chunk_bytes = 0;
  std::vector<uint32_t> crc32s;
};

}  // namespace smp::checkpoint
