#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/shm/doorbell.h"

namespace smp::shm {

/// What the ranks must have equal in one collective.
struct CollectiveStamp {
  int32_t operation = 0;
  int32_t root_or_op = 0;
  int64_t dtype = 0;
  int64_t num_bytes = 0;
  uint64_t stamp = 0;  ///< see Communicator::stamp_next

  bool operator==(const CollectiveStamp&) const = default;
};

/// Memory of the ranks of a group on one host: each writes to its own and reads
/// that of the others, in phases that all go through together.
///
/// A rank writes, calls `arrive`, and reads what others wrote once they
/// `have_arrived` as well. There are two slots, taken in turn by chunks; a
/// chunk has one phase or more. So a slot is written again only when all ranks
/// have arrived in the chunk between, and hence have read the slot. One thread
/// of a rank at a time, apart from `ring_own_bell`.
class CollectiveMemory {
 public:
  /// In one slot, of input; there is as much room for a result.
  static constexpr int64_t kSlotBytes = 256 << 10;
  static constexpr int kNumSlots = 2;
  static constexpr int kNumStamps = 4;

  /// At the begin of the memory of each rank; zeros to begin with.
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
  /// Group rank of one whose stamp differs, or -1; after the first phase.
  int find_disagreement() const;
  const CollectiveStamp& stamp_of(int group_rank) const;

  void begin_chunk() { ++num_chunks_; }
  /// Of the current chunk.
  uint8_t* input(int group_rank) const;
  uint8_t* result(int group_rank) const;

  void arrive();
  bool have_arrived() const;

  /// Returns when all have arrived in this phase, or `deadline` passed, or for
  /// no reason: first it spins, as long as that has paid lately.
  void sleep_until_arrival(std::chrono::steady_clock::time_point deadline);
  /// Any thread.
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
