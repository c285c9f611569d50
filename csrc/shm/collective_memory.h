#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/shm/doorbell.h"

namespace smp::shm {

/// The values of a call that must be equal on all ranks of a collective.
struct CollectiveStamp {
  int32_t operation = 0;
  int32_t root_or_op = 0;
  int64_t dtype = 0;
  int64_t num_bytes = 0;
  uint64_t stamp = 0;  ///< see Communicator::stamp_next

  bool operator==(const CollectiveStamp&) const = default;
};

/// Memory of the ranks of a group on one host. Each rank writes to its own part
/// and reads the others', in phases that all pass together.
///
/// A rank writes, calls `arrive`, and reads the others' data once they
/// `have_arrived` as well. There are two slots, used in turn by chunks; a chunk
/// has one phase or more. A slot is thus written again only when all ranks have
/// arrived in the chunk between, and hence have read the slot. One thread of a
/// rank at a time may call, except for `ring_own_bell`.
class CollectiveMemory {
 public:
  /// Bytes of input in one slot; a result has as much room.
  static constexpr int64_t kSlotBytes = 256 << 10;
  static constexpr int kNumSlots = 2;
  static constexpr int kNumStamps = 4;

  /// Start of the memory of each rank; all zeros at first.
  struct Control {
    alignas(64) std::atomic<uint64_t> num_arrivals{0};
    std::array<CollectiveStamp, kNumStamps> stamps{};
    Doorbell bell;
  };

  static constexpr int64_t bytes_per_rank() {
    return kDataOffset + kNumSlots * 2 * kSlotBytes;
  }

  /// @param areas  `bytes_per_rank` of each rank, page-aligned; keep mappings
  CollectiveMemory(std::vector<std::shared_ptr<uint8_t>> areas, int group_rank);

  int group_rank() const { return group_rank_; }
  int size() const { return static_cast<int>(areas_.size()); }

  /// Begins a collective.
  void begin(const CollectiveStamp& stamp);
  /// Returns a group rank whose stamp differs, or -1; call it after the first
  /// phase.
  int find_disagreement() const;
  const CollectiveStamp& stamp_of(int group_rank) const;

  void begin_chunk() { ++num_chunks_; }
  /// Returns a rank's input in the current chunk.
  uint8_t* input(int group_rank) const;
  uint8_t* result(int group_rank) const;

  void arrive();
  bool have_arrived() const;

  /// Returns when all have arrived in this phase, when `deadline` has passed,
  /// or spuriously. Spins first, as long as that has paid lately.
  void sleep_until_arrival(std::chrono::steady_clock::time_point deadline);
  /// Rings the bell of this rank; any thread may call it.
  void ring_own_bell() { control(group_rank_).bell.ring(); }

 private:
  static constexpr int64_t kPage = 4096;
  static constexpr int64_t kDataOffset =
      (static_cast<int64_t>(sizeof(Control)) + kPage - 1) / kPage * kPage;

  Control& control(int group_rank) const {
    return *reinterpret_cast<Control*>(areas_[group_rank].get());
  }
  uint8_t* slot(int group_rank) const;
  bool spin();

  const std::vector<std::shared_ptr<uint8_t>> areas_;
  const int group_rank_;
  uint64_t num_arrivals_ = 0;
  uint64_t num_chunks_ = 0;
  uint64_t num_collectives_ = 0;
  std::chrono::nanoseconds spin_time_;
};

}  // namespace smp::shm
