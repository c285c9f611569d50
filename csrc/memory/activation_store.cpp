#include "csrc/memory/activation_store.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/task_scope.h"
#include "csrc/common/without_throwing.h"

namespace smp::memory {

/// A tensor that is on the host.
struct ActivationStore::Item {
  using WeakTensor =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  explicit Item(const at::Tensor& tensor)
      : source(tensor.getIntrusivePtr()),
        counter(torch::autograd::impl::version_counter(tensor)),
        version(counter.current_version()) {}

  bool was_changed() const { return counter.current_version() != version; }

  const WeakTensor source;
  const c10::VariableVersion counter;  // of the tensor, which may be gone
  const uint32_t version;
  at::Tensor slot;  // of the pool
  at::Tensor host;  // the slot with shape, strides and dtype of the tensor
  Mark left = Mark::none();
  at::Tensor back;  // defined from the beginning of the way back
  Mark returned = Mark::none();
  bool was_used = false;
};

ActivationStore::ActivationStore(Options options)
    : options_(options),
      pool_(!options.device.is_cpu()),
      to_host_(options.device),
      to_device_(options.device) {
  SMP_CHECK_VALUE(options.horizon > 0, "the horizon of offloading is ",
                  options.horizon, "; expected at least 1");
}

ActivationStore::~ActivationStore() = default;

ActivationStore::Stats ActivationStore::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Stats stats = stats_;
  stats.pool = pool_.stats();
  return stats;
}

// ------------------------------------------------------------------- tasks

ActivationId ActivationStore::begin_forward() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.num_recomputed;
  return next_forward();
}

ActivationId ActivationStore::next_forward() {
  begin_round_if_new();
  const int mb = current_task().mb;
  const ActivationId id{mb, num_made_[mb]++};
  begin_task({false, id});
  return id;
}

void ActivationStore::begin_backward(ActivationId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  begin_task({true, id});
  live_.erase(id);
}

// Begins a round if the step is new. Outside of steps, all tasks until nothing
// is kept any more count as a step.
void ActivationStore::begin_round_if_new() {
  const int64_t step = current_task().step;
  const bool is_new = step < 0 ? live_.empty() : step != step_;
  step_ = step;
  if (!is_new) return;
  num_made_.clear();
  shared_.clear();
  if (tasks_.empty()) return;
  if (tasks_ != expected_) {
    expected_ = tasks_;
    plan_ = plan_offload(expected_, options_.horizon);
    place_.clear();
    for (size_t i = 0; i < expected_.size(); ++i) {
      place_[{expected_[i].is_backward, expected_[i].id}] = i;
    }
  }
  tasks_.clear();
}

void ActivationStore::begin_task(const ActivationTask& task) {
  forget_left();
  tasks_.push_back(task);
  load_ahead(task);
}

void ActivationStore::load_ahead(const ActivationTask& task) {
  const auto place = place_.find({task.is_backward, task.id});
  if (place != place_.end()) {
    for (const ActivationId& id : plan_.loads[place->second]) load(id);
    return;
  }
  if (!task.is_backward) return;
  std::vector<ActivationId> live;
  for (const auto& [id, kept] : live_) live.push_back(id);
  live = expected_order(std::move(live), task.id.mb);
  for (size_t i = 0; i < live.size(); ++i) {
    if (i > static_cast<size_t>(options_.horizon)) break;
    if (live[i] != task.id) load(live[i]);
  }
}

void ActivationStore::load(ActivationId id) {
  const auto found = live_.find(id);
  if (found == live_.end()) return;
  for (const auto& item : found->second->items_) {
    if (item) load(*item);
  }
  for (const auto& saved : found->second->saved_) {
    if (const auto item = saved.lock()) load(*item);
  }
}

// ------------------------------------------------------------------ copies

void ActivationStore::load(Item& item) {
  if (item.back.defined()) return;
  const at::AutoGradMode no_grad(false);
  // Made on the caller's stream, which will use and free it.
  item.back = at::empty_strided(item.host.sizes(), item.host.strides(),
                                item.host.options().device(options_.device));
  item.returned = to_device_.run(
      item.left, [&] { item.back.copy_(item.host, /*non_blocking=*/true); });
}

bool ActivationStore::may_leave(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.layout() == at::kStrided &&
         tensor.device().type() == options_.device.type() &&
         static_cast<int64_t>(tensor.nbytes()) >= options_.min_bytes &&
         // The copy has the same strides, hence the same numbers.
         tensor.is_non_overlapping_and_dense() &&
         // A parameter keeps its memory anyway.
         !(tensor.is_leaf() && tensor.requires_grad());
}

std::shared_ptr<ActivationStore::Item> ActivationStore::find_shared(
    const void* key, const at::Tensor& tensor) const {
  const auto found = shared_.find(key);
  if (found == shared_.end()) return nullptr;
  auto item = found->second.lock();
  const bool is_same = item && item->source.lock() == tensor.getIntrusivePtr();
  return is_same && !item->was_changed() ? item : nullptr;
}

std::shared_ptr<ActivationStore::Item> ActivationStore::offload(
    const at::Tensor& tensor) {
  auto item = std::make_shared<Item>(tensor);
  const at::AutoGradMode no_grad(false);
  copy_to_host(*item, tensor.detach());
  shared_[tensor.unsafeGetTensorImpl()] = item;
  return item;
}

void ActivationStore::copy_to_host(Item& item, const at::Tensor& data) {
  const auto num_bytes = static_cast<int64_t>(data.nbytes());
  item.slot = pool_.take(num_bytes);
  item.host = item.slot.narrow(0, 0, num_bytes)
                  .view(data.scalar_type())
                  .as_strided(data.sizes(), data.strides(), 0);
  item.left = to_host_.run(
      Mark::none(), [&] { item.host.copy_(data, /*non_blocking=*/true); });
  ++stats_.num_offloaded;
  stats_.bytes_offloaded += num_bytes;
}

// Frees tensors whose copies are done; no thread waits for that.
void ActivationStore::forget_left() {
  while (!leaving_.empty() && leaving_.front().copied.is_over()) {
    leaving_.pop_front();
  }
}

// Frees the tensors' memory for the next work of the current stream, which
// therefore has to come after the copies.
void ActivationStore::let_leave(std::vector<at::Tensor> tensors) {
  if (tensors.empty() || options_.device.is_cpu()) return;
  // A mark of its own, because the items' marks are used by the way back.
  leaving_.push_back({std::move(tensors), to_host_.end()});
  while (leaving_.size() > kMaxLeaving) {
    to_host_.let_caller_wait(leaving_.front().copied);
    leaving_.pop_front();
  }
}

std::shared_ptr<ActivationStore::Kept> ActivationStore::keep(
    ActivationId id, std::vector<at::Tensor>& tensors) {
  auto kept = std::make_shared<Kept>(shared_from_this(), id);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto place = place_.find({false, id});
  const bool stays = place != place_.end() && plan_.stays[place->second];
  std::vector<at::Tensor> leaving;
  for (at::Tensor& tensor : tensors) {
    auto& item = kept->items_.emplace_back();
    if (!may_leave(tensor)) continue;
    if (stays) {
      ++stats_.num_stayed;
      continue;
    }
    item = find_shared(tensor.unsafeGetTensorImpl(), tensor);
    if (!item) {
      item = offload(tensor);
      leaving.push_back(tensor);
    }
    tensor.reset();
  }
  let_leave(std::move(leaving));
  live_[id] = kept.get();
  return kept;
}

std::vector<at::Tensor> ActivationStore::tensors_of(Kept& kept) {
  std::vector<at::Tensor> tensors;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& item : kept.items_) {
    tensors.emplace_back();
    if (!item) continue;
    SMP_CHECK_VALUE(!item->was_changed(),
                    "an argument of a checkpointed module was changed in place "
                    "after the call (version ",
                    item->counter.current_version(), ", was ", item->version,
                    "); change a copy (.clone())");
    if (!item->was_used) {
      ++(item->back.defined() ? stats_.num_loaded_ahead
                              : stats_.num_loaded_late);
    }
    load(*item);
    to_device_.let_caller_wait(item->returned);
    item->was_used = true;
    tensors.back() = item->back;
  }
  return tensors;
}

// Called by a destructor: throws nothing, also if the device has failed.
void ActivationStore::release(Kept& kept) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(kept.id_);
  if (found != live_.end() && found->second == &kept) live_.erase(found);
  for (auto& item : kept.items_) give_back(std::move(item));
}

void ActivationStore::give_back(std::shared_ptr<Item> item) {
  if (!item || item.use_count() > 1) return;  // another one has it too
  without_throwing("giving back the host memory of an activation", [&] {
    // The next copy into the slot, and the next user of the device memory,
    // must not overtake a copy that was never waited for.
    if (item->back.defined() && !item->was_used) {
      to_host_.wait(item->returned);
      to_device_.let_caller_wait(item->returned);
    }
    pool_.give_back(std::move(item->slot));
  });
}

// ------------------------------------------------- tensors saved by autograd

namespace {

// Returns the tensor whose memory a tensor shows.
at::Tensor root_of(const at::Tensor& tensor) {
  if (!tensor.is_view()) return tensor;
  return at::Tensor(at::TensorBase(tensor._base()));
}

// Returns a tensor with the storage of another one, and no view of that.
at::Tensor with_storage_of(const at::Tensor& tensor, at::ScalarType dtype,
                           at::IntArrayRef sizes, at::IntArrayRef strides,
                           int64_t offset) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), tensor.key_set(),
      c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

}  // namespace

ActivationStore::Saved::Saved(std::shared_ptr<Kept> group,
                              const at::Tensor& tensor)
    : group_(std::move(group)),
      counter_(torch::autograd::impl::version_counter(tensor)),
      version_(counter_.current_version()),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      offset_(tensor.storage_offset()),
      dtype_(tensor.scalar_type()) {}

ActivationStore::Saving::~Saving() {
  without_throwing("ending a forward whose saved tensors go to the host",
                   [&] { end(); });
}

void ActivationStore::set_resident(const std::vector<at::Tensor>& tensors) {
  std::lock_guard<std::mutex> lock(mutex_);
  resident_.clear();
  for (const at::Tensor& tensor : tensors) {
    if (tensor.has_storage()) {
      resident_.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }
}

bool ActivationStore::may_save(const at::Tensor& tensor) const {
  if (tensor.layout() != at::kStrided || !tensor.has_storage() ||
      tensor.device().type() != options_.device.type() ||
      tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
      tensor.is_quantized() || tensor.is_conj() || tensor.is_neg() ||
      tensor._is_zerotensor() || tensor.numel() == 0) {
    return false;
  }
  const at::Storage& storage = tensor.storage();
  const auto num_bytes = static_cast<int64_t>(storage.nbytes());
  if (num_bytes < options_.min_bytes || num_bytes % tensor.itemsize() != 0 ||
      resident_.count(storage.unsafeGetStorageImpl())) {
    return false;
  }
  const at::Tensor root = root_of(tensor);
  if (root.requires_grad()) return !root.is_leaf();  // a parameter, or a view
  // A tensor without gradient may be a small part of the script's data.
  return static_cast<int64_t>(tensor.nbytes()) == num_bytes;
}

std::shared_ptr<ActivationStore::Saved> ActivationStore::save(
    Saving& saving, const at::Tensor& tensor) {
  std::shared_ptr<Kept> group;  // these may end without the lock
  std::shared_ptr<Saved> saved;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!may_save(tensor)) return nullptr;
  if (!saving.group_) {
    const ActivationId id = next_forward();
    saving.group_ = std::make_shared<Kept>(shared_from_this(), id);
    const auto place = place_.find({false, id});
    saving.group_->stays_ = place != place_.end() && plan_.stays[place->second];
    live_[id] = saving.group_.get();
  }
  group = saving.group_;
  saved = std::make_shared<Saved>(group, tensor);
  if (group->stays_) {
    ++stats_.num_stayed;
    // Not the tensor itself: a saved result would keep its own node alive.
    saved->stayed_ = tensor.detach();
  } else {
    saved->item_ = offload_storage(saving, tensor);
    group->saved_.push_back(saved->item_);
  }
  // Counts what stays, too, so that groups are those of the last step.
  group->num_bytes_ += static_cast<int64_t>(tensor.nbytes());
  if (group->num_bytes_ >= options_.group_bytes) {
    let_leave(std::exchange(saving.leaving_, {}));
    saving.group_.reset();
  }
  return saved;
}

void ActivationStore::end(Saving& saving) {
  std::shared_ptr<Kept> group;  // may end without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  group.swap(saving.group_);
  let_leave(std::exchange(saving.leaving_, {}));
}

std::shared_ptr<ActivationStore::Item> ActivationStore::offload_storage(
    Saving& saving, const at::Tensor& tensor) {
  const at::AutoGradMode no_grad(false);
  const at::Storage& storage = tensor.storage();
  const void* const key = storage.unsafeGetStorageImpl();
  const at::Tensor root = root_of(tensor);
  if (auto item = find_shared(key, root)) return item;
  auto item = std::make_shared<Item>(root);
  const auto num_bytes = static_cast<int64_t>(storage.nbytes());
  const at::Tensor all = with_storage_of(
      tensor, tensor.scalar_type(),
      {num_bytes / static_cast<int64_t>(tensor.itemsize())}, {1}, 0);
  copy_to_host(*item, all);
  if (!options_.device.is_cpu()) saving.leaving_.push_back(all);
  shared_[key] = item;
  return item;
}

at::Tensor ActivationStore::tensor_of(Saved& saved) {
  std::lock_guard<std::mutex> lock(mutex_);
  Kept& group = *saved.group_;
  if (!group.has_begun_) {
    group.has_begun_ = true;
    begin_task({true, group.id_});
    live_.erase(group.id_);
  }
  SMP_CHECK(saved.counter_.current_version() == saved.version_,
            "a tensor of shape ", at::IntArrayRef(saved.sizes_),
            " that is needed to compute gradients was changed in place (it is "
            "at version ",
            saved.counter_.current_version(), "; expected version ",
            saved.version_, "); change a copy (.clone())");
  if (!saved.item_) return saved.stayed_;
  Item& item = *saved.item_;
  if (!item.was_used) {
    ++(item.back.defined() ? stats_.num_loaded_ahead : stats_.num_loaded_late);
  }
  load(item);
  to_device_.let_caller_wait(item.returned);
  item.was_used = true;
  return with_storage_of(item.back, saved.dtype_, saved.sizes_, saved.strides_,
                         saved.offset_);
}

// Called by a destructor, as above.
void ActivationStore::release(Saved& saved) {
  std::lock_guard<std::mutex> lock(mutex_);
  give_back(std::move(saved.item_));
}

}  // namespace smp::memory
