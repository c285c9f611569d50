#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <vector>

namespace smp::parameters {

/// Keeps memory of freed parameters for others of the same size. On the host
/// only, where fresh pages cost as much as filling them; devices have an
/// allocator that does this. Not thread-safe.
class StoragePool {
 public:
  explicit StoragePool(at::Device device)
      : device_(device), is_used_(device.is_cpu()) {}

  /// Announces one more tensor of this size. Memory is kept only where several
  /// tensors share it.
  void expect(int64_t num_bytes) { ++num_users_[num_bytes]; }

  /// @return memory on the device of the pool, whichever device is current in
  ///     the calling thread
  at::DataPtr take(int64_t num_bytes, at::Allocator* allocator);
  void give(int64_t num_bytes, at::DataPtr memory);
  void clear() { free_.clear(); }

 private:
  const at::Device device_;
  const bool is_used_;
  std::map<int64_t, int> num_users_;
  std::map<int64_t, std::vector<at::DataPtr>> free_;
};

}  // namespace smp::parameters
