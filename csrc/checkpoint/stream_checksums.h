#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace smp::checkpoint {

/// Checksums of a stream of bytes in one pass: of its chunks of equal size, and
/// of its records, whose borders lie anywhere.
class StreamChecksums {
 public:
  explicit StreamChecksums(int64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}

  void add(std::span<const std::byte> bytes);

  /// Returns the CRC-32 of the bytes since the last call, or since the
  /// beginning.
  uint32_t take_record();

  /// Returns the checksums of all chunks; the stream has ended.
  std::vector<uint32_t> finish();

 private:
  // Bytes with a checksum of their own, which ended at the last border.
  struct Sum {
    uint32_t crc = 0;
    void append(uint32_t other, int64_t other_bytes);
  };

  void end_segment();

  int64_t chunk_bytes_;
  int64_t in_chunk_ = 0;
  uint32_t segment_ = 0;  // since the last border of either kind
  int64_t segment_bytes_ = 0;
  Sum chunk_;
  Sum record_;
  std::vector<uint32_t> chunks_;
};

}  // namespace smp::checkpoint
