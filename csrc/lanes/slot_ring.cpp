#include "csrc/lanes/slot_ring.h"

#include "csrc/common/check.h"

namespace smp::lanes {

SlotRing::SlotRing(int num_slots) {
  SMP_CHECK_VALUE(num_slots > 0, "a lane needs at least one slot, got ",
                  num_slots);
  for (int32_t slot = 0; slot < num_slots; ++slot) free_.push_back(slot);
}

std::optional<SlotRing::Slot> SlotRing::take(int dst) {
  std::lock_guard lock(mutex_);
  if (free_.empty()) return std::nullopt;
  const Slot slot{free_.front(), next_sequence_[dst]++};
  free_.pop_front();
  in_use_[slot.index] = {dst, slot.sequence};
  return slot;
}

void SlotRing::give_back(int src, const Receipt& receipt) {
  std::lock_guard lock(mutex_);
  const auto found = in_use_.find(receipt.slot);
  SMP_CHECK(found != in_use_.end() && found->second.dst == src &&
                found->second.sequence == receipt.sequence,
            "global_rank ", src, " gave back slot ", receipt.slot,
            " of a lane for tensor ", receipt.sequence,
            ", which it does not have; ranks that run different versions of "
            "smp cannot work together");
  in_use_.erase(found);
  free_.push_back(receipt.slot);
}

int SlotRing::num_free() const {
  std::lock_guard lock(mutex_);
  return static_cast<int>(free_.size());
}

void ArrivalOrder::check(int src, const Descriptor& descriptor) {
  std::lock_guard lock(mutex_);
  int64_t& next = next_sequence_[src];
  SMP_CHECK(descriptor.sequence == next, "expected tensor ", next,
            " of a lane from global_rank ", src, ", got tensor ",
            descriptor.sequence, ": one was lost");
  ++next;
}

}  // namespace smp::lanes
