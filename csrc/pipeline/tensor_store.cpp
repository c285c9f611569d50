#include "csrc/pipeline/tensor_store.h"

#include <utility>

namespace smp::pipeline {

void TensorStore::put(const mailbox::Ref& ref, int64_t mb,
                      memory::MarkedTensor tensor) {
  std::vector<Callback> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Entry& entry = entries_[ref];
    if (entry.tensor.data.defined()) return;
    entry.mb = mb;
    callbacks = std::exchange(entry.waiting, {});
    if (entry.is_released) {
      entries_.erase(ref);
    } else if (callbacks.empty()) {
      entry.tensor = std::move(tensor);
    } else {
      entry.tensor = tensor;
    }
  }
  for (size_t i = 0; i < callbacks.size(); ++i) {
    callbacks[i](i + 1 < callbacks.size() ? tensor : std::move(tensor));
  }
}

void TensorStore::when_available(const mailbox::Ref& ref, int64_t mb,
                                 Callback callback) {
  memory::MarkedTensor tensor;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Entry& entry = entries_[ref];
    entry.mb = mb;
    tensor = entry.tensor;
    if (!tensor.data.defined()) entry.waiting.push_back(std::move(callback));
  }
  if (tensor.data.defined()) callback(std::move(tensor));
}

memory::MarkedTensor TensorStore::find(const mailbox::Ref& ref) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(ref);
  return found == entries_.end() ? memory::MarkedTensor()
                                 : found->second.tensor;
}

void TensorStore::release(const mailbox::Ref& ref, int64_t mb) {
  memory::MarkedTensor dropped;  // freed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [found, is_new] = entries_.try_emplace(ref);
  if (found->second.tensor.data.defined()) {
    dropped = std::move(found->second.tensor);
    entries_.erase(found);
    return;
  }
  // Code that waits belongs to its own microbatch, not to the messenger's.
  if (is_new) found->second.mb = mb;
  found->second.is_released = true;
}

void TensorStore::drop_microbatch(int64_t mb) {
  std::vector<Entry> dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->second.mb == mb) {
      dropped.push_back(std::move(it->second));
      it = entries_.erase(it);
    } else {
      ++it;
    }
  }
}

void TensorStore::clear() {
  decltype(entries_) dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(entries_);
}

int64_t TensorStore::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(entries_.size());
}

}  // namespace smp::pipeline
