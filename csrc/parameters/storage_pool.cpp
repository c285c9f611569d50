#include "csrc/parameters/storage_pool.h"

#include <c10/core/DeviceGuard.h>

#include <utility>

#include "csrc/memory/host_pages.h"

namespace smp::parameters {

at::DataPtr StoragePool::take(int64_t num_bytes, at::Allocator* allocator) {
  const auto found = free_.find(num_bytes);
  if (found == free_.end() || found->second.empty()) {
    if (is_used_ && num_bytes >= memory::kOwnPagesBytes) {
      return memory::take_pages(num_bytes);
    }
    const c10::DeviceGuard guard(
        device_);  // an allocator takes the current one
    return allocator->allocate(static_cast<size_t>(num_bytes));
  }
  at::DataPtr memory = std::move(found->second.back());
  found->second.pop_back();
  return memory;
}

void StoragePool::give(int64_t num_bytes, at::DataPtr memory) {
  if (!is_used_ || num_users_[num_bytes] < 2) return;
  free_[num_bytes].push_back(std::move(memory));
}

}  // namespace smp::parameters
