#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>

#include "csrc/lanes/descriptor.h"

namespace smp::lanes {

/// The slots of a lane in use, on the sender's side. Each pair of ranks has its
/// own sequence, so that neither side takes one tensor for another. The slot
/// that has been free for longest is used next: the copy that read it last is
/// the likeliest to be over. Thread-safe.
class SlotRing {
 public:
  struct Slot {
    int32_t index = -1;
    int64_t sequence = 0;
  };

  explicit SlotRing(int num_slots);

  /// Reserves a slot for a tensor to `dst`; returns none while all are in use.
  std::optional<Slot> take(int dst);
  /// Frees a slot that `src` does not need any more.
  /// @throws Error when `src` did not have it
  void give_back(int src, const Receipt& receipt);

  int num_free() const;

 private:
  struct Use {
    int dst = -1;
    int64_t sequence = 0;
  };

  mutable std::mutex mutex_;
  std::deque<int32_t> free_;  // in the order of release
  std::map<int32_t, Use> in_use_;
  std::map<int, int64_t> next_sequence_;  // by destination
};

/// Checks on the receiver's side that tensors come in the order in which they
/// were posted. Thread-safe.
class ArrivalOrder {
 public:
  /// @throws Error when the tensor is not the next one of `src`
  void check(int src, const Descriptor& descriptor);

 private:
  std::mutex mutex_;
  std::map<int, int64_t> next_sequence_;  // by source
};

}  // namespace smp::lanes
