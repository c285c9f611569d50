#include "csrc/gradients/flat_pool.h"

#include <algorithm>
#include <utility>

#include "csrc/memory/host_pages.h"

namespace smp::gradients {

namespace {

// Memory that is more than twice too large would be wasted.
bool is_near(int64_t larger, int64_t numel) {
  return larger >= numel && larger <= 2 * numel;
}

}  // namespace

void FlatPool::expect(int64_t numel, at::ScalarType dtype) {
  expected_.emplace_back(dtype, numel);
}

// If all tensors have one size, each can take the memory of another.
int64_t FlatPool::common_size(int64_t numel, at::ScalarType dtype) const {
  int64_t largest = numel;
  for (const auto& [other_dtype, other] : expected_) {
    if (other_dtype == dtype && is_near(other, numel)) {
      largest = std::max(largest, other);
    }
  }
  return largest;
}

at::Tensor FlatPool::take(int64_t numel, const at::TensorOptions& options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const bool fits = it->scalar_type() == dtype && is_near(it->numel(), numel);
    if (fits && (best == free_.end() || it->numel() < best->numel())) best = it;
  }
  if (best != free_.end()) {
    at::Tensor tensor = std::move(*best);
    free_.erase(best);
    return tensor;
  }
  at::Tensor tensor =
      memory::empty_in_pages(common_size(numel, dtype), options);
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

}  // namespace smp::gradients
