#include "csrc/pipeline/remote_ref.h"

#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstring>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

// A ref in the handle's TensorImpl. C++ finds the ref of any tensor that
// autograd hands over, without asking Python.
struct RefMeta final : c10::BackendMeta {
  explicit RefMeta(RemoteRefPtr the_ref) : ref(std::move(the_ref)) {}
  RemoteRefPtr ref;
};

}  // namespace

TensorMeta TensorMeta::of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.scalar_type(), tensor.requires_grad()};
}

int64_t TensorMeta::num_bytes() const {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return numel * static_cast<int64_t>(c10::elementSize(dtype));
}

void TensorMeta::append_to(std::string& bytes) const {
  bytes.push_back(static_cast<char>(dtype));
  bytes.push_back(static_cast<char>(requires_grad));
  bytes.push_back(static_cast<char>(sizes.size()));
  for (const int64_t size : sizes) {
    bytes.append(reinterpret_cast<const char*>(&size), sizeof size);
  }
}

void ReleaseList::add(Released released) {
  std::lock_guard<std::mutex> lock(mutex_);
  released_.push_back(std::move(released));
}

std::vector<ReleaseList::Released> ReleaseList::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(released_, {});
}

void ReleaseList::clear() { take(); }

void Route::add(int result_idx, int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::pair<int, int> hop{result_idx, rank};
  if (std::find(hops_.begin(), hops_.end(), hop) == hops_.end()) {
    hops_.push_back(hop);
  }
}

void Route::remove(int result_idx, int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase(hops_, std::pair<int, int>{result_idx, rank});
}

Route::Hops Route::hops() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return hops_;
}

std::string with_hops(const Route::Hops& hops, const std::string& structure) {
  std::string bytes;
  bytes.push_back(static_cast<char>(hops.size()));
  for (const auto& [idx, rank] : hops) {
    const int32_t pair[2] = {idx, rank};
    bytes.append(reinterpret_cast<const char*>(pair), sizeof pair);
  }
  return bytes + structure;
}

Route::Hops take_hops(std::string& bytes) {
  SMP_CHECK(!bytes.empty(), "a request has no route");
  const auto count = static_cast<uint8_t>(bytes[0]);
  SMP_CHECK(bytes.size() >= 1 + count * 2 * sizeof(int32_t),
            "the route of a request ends early");
  Route::Hops hops;
  for (size_t i = 0; i < count; ++i) {
    int32_t pair[2];
    std::memcpy(pair, bytes.data() + 1 + i * sizeof pair, sizeof pair);
    hops.emplace_back(pair[0], pair[1]);
  }
  bytes.erase(0, 1 + count * 2 * sizeof(int32_t));
  return hops;
}

RemoteRef::~RemoteRef() {
  if (route) {  // unused data are not sent again
    for (const int rank : foreseen) route->remove(result_idx, rank);
  }
  if (!releases) return;
  if (!is_argument) copies.push_back(home_rank);
  releases->add({ref, std::move(copies)});
}

RemoteRefPtr remote_ref_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  auto* meta =
      dynamic_cast<RefMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return meta ? meta->ref : nullptr;
}

void attach_remote_ref(const at::Tensor& handle, RemoteRefPtr ref) {
  handle.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<RefMeta>(std::move(ref)));
}

}  // namespace smp::pipeline
