#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/mailbox/message.h"
#include "csrc/mailbox/wire.h"
#include "csrc/shm/shared_ring.h"

namespace smp::lanes {
class LaneTable;
}

namespace smp::mailbox {

/// Assembles the messages of one peer from the bytes of a ring, large tensors
/// directly in their final memory.
class IncomingMessage {
 public:
  /// @param lanes  lanes of this rank; null: there are none
  explicit IncomingMessage(int source_rank, lanes::LaneTable* lanes = nullptr);

  /// Reads at most `budget` bytes and subtracts them from it.
  /// @return true when a message is complete; `take` it before the next call
  /// @throws CorruptMessage; Error when the ring is corrupt
  bool read_from(shm::RingReader& ring, int64_t& budget);

  int64_t num_bytes() const { return num_bytes_; }
  Message take();

 private:
  enum class Stage { kHeader, kBlob, kLarge, kComplete };

  bool fill(shm::RingReader& ring, uint8_t* to, int64_t size, int64_t& budget);
  void end_header();
  void end_blob();
  void next_large();

  const int source_rank_;
  lanes::LaneTable* const lanes_;
  uint64_t next_sequence_ = 0;
  Stage stage_ = Stage::kHeader;
  int64_t filled_ = 0;  // of the part that `stage_` reads
  std::vector<uint8_t> header_bytes_;
  std::vector<uint8_t> blob_;
  wire::Header header_;
  std::vector<at::Tensor> large_;  // still to come, the current one included
  size_t large_index_ = 0;
  int64_t num_bytes_ = 0;
};

}  // namespace smp::mailbox
