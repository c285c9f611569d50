#include "csrc/data_parallel/flat_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace smp::data_parallel {

at::Tensor FlatPool::take(int64_t numel, const at::TensorOptions& options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    // Twice too large would be a waste while somebody else needs it.
    const bool fits = it->scalar_type() == dtype && it->numel() >= numel &&
                      it->numel() <= 2 * numel;
    if (fits && (best == free_.end() || it->numel() < best->numel())) best = it;
  }
  if (best != free_.end()) {
    at::Tensor tensor = std::move(*best);
    free_.erase(best);
    return tensor;
  }
  at::Tensor tensor = at::empty({numel}, options);
  held_bytes_ += static_cast<int64_t>(tensor.nbytes());
  peak_bytes_ = std::max(peak_bytes_, held_bytes_);
  return tensor;
}

void FlatPool::give_back(at::Tensor tensor) {
  free_.push_back(std::move(tensor));
}

void FlatPool::trim() {
  for (const at::Tensor& tensor : free_) {
    held_bytes_ -= static_cast<int64_t>(tensor.nbytes());
  }
  free_.clear();
}

}  // namespace smp::data_parallel
