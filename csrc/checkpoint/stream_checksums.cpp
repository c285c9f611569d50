#include "csrc/checkpoint/stream_checksums.h"

#include <algorithm>
#include <utility>

#include "csrc/checkpoint/crc32.h"

namespace smp::checkpoint {

void StreamChecksums::Sum::append(uint32_t other, int64_t other_bytes) {
  crc = crc32_combine(crc, other, static_cast<uint64_t>(other_bytes));
}

void StreamChecksums::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t room = static_cast<size_t>(chunk_bytes_ - in_chunk_);
    const auto piece = bytes.first(std::min(room, bytes.size()));
    segment_ = crc32(piece, segment_);
    segment_bytes_ += static_cast<int64_t>(piece.size());
    in_chunk_ += static_cast<int64_t>(piece.size());
    if (in_chunk_ == chunk_bytes_) {
      end_segment();
      chunks_.push_back(std::exchange(chunk_, {}).crc);
      in_chunk_ = 0;
    }
    bytes = bytes.subspan(piece.size());
  }
}

uint32_t StreamChecksums::take_record() {
  end_segment();
  return std::exchange(record_, {}).crc;
}

std::vector<uint32_t> StreamChecksums::finish() {
  end_segment();
  if (in_chunk_ > 0) chunks_.push_back(chunk_.crc);
  return std::move(chunks_);
}

void StreamChecksums::end_segment() {
  chunk_.append(segment_, segment_bytes_);
  record_.append(segment_, segment_bytes_);
  segment_ = 0;
  segment_bytes_ = 0;
}

}  // namespace smp::checkpoint
