#include "csrc/pipeline/caller_state.h"

#include <algorithm>

namespace smp::pipeline {

void CallerState::add_ref(const RemoteRefPtr& ref) {
  if (refs.size() >= prune_at_) {
    std::erase_if(refs, [](const auto& weak) { return weak.expired(); });
    prune_at_ = std::max<size_t>(64, 2 * refs.size());
  }
  refs.push_back(ref);
}

RemoteRefPtr CallerState::find_sent(const at::Tensor& tensor) {
  RemoteRefPtr found;
  std::erase_if(sent, [&](const SentTensor& entry) {
    const auto alive = entry.tensor.lock();
    if (!alive) return true;
    if (alive.get() != tensor.unsafeGetTensorImpl()) return false;
    if (entry.version != tensor._version()) return true;
    found = entry.ref;
    return false;
  });
  return found;
}

}  // namespace smp::pipeline
