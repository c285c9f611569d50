#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

namespace smp::memory {

/// Host memory for tensors that are away from their device, in slots that are
/// made once and reused: page-locking memory is slow, and the amount is
/// limited. A slot has the size of its class, at most an eighth above the
/// request. Not thread-safe.
class HostPool {
 public:
  struct Stats {
    int64_t num_slots = 0;
    int64_t slots_in_use = 0;
    int64_t peak_slots_in_use = 0;
    int64_t bytes = 0;  ///< of all slots
    int64_t bytes_in_use = 0;
    int64_t peak_bytes_in_use = 0;
  };

  /// @param is_pinned  whether slots are page-locked, which needs an
  ///                   accelerator
  explicit HostPool(bool is_pinned) : is_pinned_(is_pinned) {}

  /// Returns the size of the class of `num_bytes`, which must be positive.
  static int64_t size_class(int64_t num_bytes);

  /// @return uint8 `[size_class(num_bytes)]` on the CPU, with any values
  at::Tensor take(int64_t num_bytes);
  /// @param slot  result of `take`; nothing may read or write it afterwards
  void give_back(at::Tensor slot);

  const Stats& stats() const { return stats_; }

 private:
  const bool is_pinned_;
  std::map<int64_t, std::vector<at::Tensor>> free_;  // by size
  Stats stats_;
};

}  // namespace smp::memory
