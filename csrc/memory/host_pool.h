#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

namespace smp::memory {

/// Host memory for tensors that are away from their device, in slots that are
/// made once and used again: page-locking memory is slow, and there is not much
/// of it. A slot has the size of its class, which is at most an eighth more
/// than was asked for. Not thread-safe.
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

  /// @param is_pinned  page-locked, which an accelerator must be there for
  explicit HostPool(bool is_pinned) : is_pinned_(is_pinned) {}

  /// Size of the class of `num_bytes`, which must be positive.
  static int64_t size_class(int64_t num_bytes);

  /// @return uint8 `[size_class(num_bytes)]` on the CPU, its values anything
  at::Tensor take(int64_t num_bytes);
  /// @param slot  of `take`; nothing may read or write it afterwards
  void give_back(at::Tensor slot);

  const Stats& stats() const { return stats_; }

 private:
  const bool is_pinned_;
  std::map<int64_t, std::vector<at::Tensor>> free_;  // by size
  Stats stats_;
};

}  // namespace smp::memory
