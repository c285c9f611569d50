#include "csrc/memory/host_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "csrc/common/check.h"

namespace smp::memory {

int64_t HostPool::size_class(int64_t num_bytes) {
  SMP_ASSERT(num_bytes > 0, "a slot of ", num_bytes, " bytes");
  constexpr int64_t kPage = 4096;
  const auto wanted = static_cast<uint64_t>(num_bytes);
  const auto step = std::max<int64_t>(
      kPage, static_cast<int64_t>(std::bit_floor(wanted)) / 8);
  return (num_bytes + step - 1) / step * step;
}

at::Tensor HostPool::take(int64_t num_bytes) {
  const int64_t size = size_class(num_bytes);
  std::vector<at::Tensor>& free = free_[size];
  at::Tensor slot;
  if (free.empty()) {
    slot = at::empty({size},
                     at::TensorOptions(at::kByte).pinned_memory(is_pinned_));
    ++stats_.num_slots;
    stats_.bytes += size;
  } else {
    slot = std::move(free.back());
    free.pop_back();
  }
  ++stats_.slots_in_use;
  stats_.bytes_in_use += size;
  stats_.peak_slots_in_use =
      std::max(stats_.peak_slots_in_use, stats_.slots_in_use);
  stats_.peak_bytes_in_use =
      std::max(stats_.peak_bytes_in_use, stats_.bytes_in_use);
  return slot;
}

void HostPool::give_back(at::Tensor slot) {
  const int64_t size = slot.numel();
  --stats_.slots_in_use;
  stats_.bytes_in_use -= size;
  free_[size].push_back(std::move(slot));
}

}  // namespace smp::memory
