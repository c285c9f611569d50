#include "csrc/mailbox/incoming_message.h"

#include <algorithm>
#include <utility>

namespace smp::mailbox {
namespace {

// Bytes read at a time: the writer may reuse their place before a whole tensor
// is read.
constexpr int64_t kPieceBytes = 64 << 10;
// Largest blob whose memory is kept; a longer one is rare.
constexpr size_t kKeptBlobBytes = 1 << 20;

}  // namespace

IncomingMessage::IncomingMessage(int source_rank, lanes::LaneTable* lanes)
    : source_rank_(source_rank),
      lanes_(lanes),
      header_bytes_(wire::kHeaderBytes) {}

bool IncomingMessage::read_from(shm::RingReader& ring, int64_t& budget) {
  while (stage_ != Stage::kComplete) {
    switch (stage_) {
      case Stage::kHeader:
        if (!fill(ring, header_bytes_.data(), wire::kHeaderBytes, budget)) {
          return false;
        }
        end_header();
        break;
      case Stage::kBlob:
        if (!fill(ring, blob_.data(), header_.blob_bytes, budget)) return false;
        end_blob();
        break;
      default: {
        const at::Tensor& tensor = large_[large_index_];
        if (!fill(ring, tensor.mutable_data_ptr<uint8_t>(), tensor.numel(),
                  budget)) {
          return false;
        }
        ++large_index_;
        next_large();
      }
    }
  }
  return true;
}

// Returns whether the part of `size` bytes at `to` is complete.
bool IncomingMessage::fill(shm::RingReader& ring, uint8_t* to, int64_t size,
                           int64_t& budget) {
  while (filled_ < size) {
    const int64_t wanted = std::min({size - filled_, budget, kPieceBytes});
    const auto got = static_cast<int64_t>(
        ring.read(to + filled_, static_cast<size_t>(wanted)));
    if (got == 0) return false;
    filled_ += got;
    budget -= got;
  }
  filled_ = 0;
  return true;
}

void IncomingMessage::end_header() {
  header_ = wire::decode_header(header_bytes_, source_rank_);
  wire::check_sequence(header_, next_sequence_++, "the shared memory");
  num_bytes_ = wire::kHeaderBytes + header_.blob_bytes + header_.large_bytes;
  blob_.resize(static_cast<size_t>(header_.blob_bytes));
  stage_ = Stage::kBlob;
}

void IncomingMessage::end_blob() {
  large_ = wire::decode_blob(blob_, header_, lanes_);
  if (blob_.capacity() > kKeptBlobBytes) blob_ = {};
  large_index_ = 0;
  next_large();
}

void IncomingMessage::next_large() {
  stage_ = large_index_ < large_.size() ? Stage::kLarge : Stage::kComplete;
}

Message IncomingMessage::take() {
  large_.clear();
  stage_ = Stage::kHeader;
  return std::exchange(header_, {}).message;
}

}  // namespace smp::mailbox
