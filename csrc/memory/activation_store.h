#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "csrc/memory/copy_stream.h"
#include "csrc/memory/host_pool.h"
#include "csrc/memory/offload_plan.h"

namespace smp::memory {

/// Keeps tensors that are needed for a backward in host memory until then:
/// those of recomputed calls, or all that autograd saves.
///
/// A step is a list of tasks, forwards and backwards of recomputed calls, or of
/// stretches of a forward that save `group_bytes` (`Saving`). The
/// list of the last step is the expectation for the next one. Activations that
/// are needed soon stay, and the others begin to come back `horizon` tasks
/// ahead (`plan_offload`). If the expectation fails, and in the first step,
/// `expected_order` gives the order of return. It decides about time only: an
/// activation that is needed and was not foreseen is loaded then. Thread-safe.
/// Source: the public smp v1 guide (activation offloading); task list, pool and
/// streams are our design.
class ActivationStore : public std::enable_shared_from_this<ActivationStore> {
 public:
  struct Options {
    c10::Device device = c10::Device(c10::DeviceType::CPU);
    int horizon = 4;
    int64_t min_bytes = 1 << 20;     ///< smaller tensors stay
    int64_t group_bytes = 64 << 20;  ///< of saved tensors that are one task
  };

  struct Stats {
    int64_t num_recomputed = 0;
    int64_t num_offloaded = 0;  ///< tensors that went to the host
    int64_t bytes_offloaded = 0;
    int64_t num_stayed = 0;        ///< tensors that were needed too soon
    int64_t num_loaded_ahead = 0;  ///< came back before they were needed
    int64_t num_loaded_late = 0;   ///< only then
    HostPool::Stats pool;
  };

  struct Item;

  /// Most calls that may have tensors on the device whose copies still run.
  /// With two, the copies of one call can take as long as the next one's
  /// forward.
  static constexpr size_t kMaxLeaving = 2;

  /// The tensors taken from one recomputed call; its end frees the host memory.
  class Kept {
   public:
    Kept(std::shared_ptr<ActivationStore> store, ActivationId id)
        : store_(std::move(store)), id_(id) {}
    ~Kept() { store_->release(*this); }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

   private:
    friend class ActivationStore;
    const std::shared_ptr<ActivationStore> store_;
    const ActivationId id_;
    std::vector<std::shared_ptr<Item>> items_;  // null: not taken
    std::vector<std::weak_ptr<Item>> saved_;    // each `Saved` has its own
    bool stays_ = false;
    bool has_begun_ = false;  // the backward
    int64_t num_bytes_ = 0;   // of saved tensors
  };

  /// A tensor that autograd has saved, until its node frees it.
  class Saved {
   public:
    Saved(std::shared_ptr<Kept> group, const at::Tensor& tensor);
    ~Saved() { group_->store_->release(*this); }
    Saved(const Saved&) = delete;
    Saved& operator=(const Saved&) = delete;

    /// Returns the tensor, on the device. The current stream waits for it.
    /// @throws RuntimeError when it was changed in place since
    at::Tensor tensor() { return group_->store_->tensor_of(*this); }

   private:
    friend class ActivationStore;
    const std::shared_ptr<Kept> group_;
    std::shared_ptr<Item> item_;  // null: the tensor stayed
    at::Tensor stayed_;
    const c10::VariableVersion counter_;
    const uint32_t version_;
    const std::vector<int64_t> sizes_, strides_;
    const int64_t offset_;
    const at::ScalarType dtype_;
  };

  /// A forward whose saved tensors go to the host, in groups. Not thread-safe.
  class Saving {
   public:
    explicit Saving(std::shared_ptr<ActivationStore> store)
        : store_(std::move(store)) {}
    ~Saving();
    Saving(const Saving&) = delete;
    Saving& operator=(const Saving&) = delete;

    /// Takes a tensor that autograd saves. Its whole storage goes to the host,
    /// once for all tensors that share it.
    /// @return null if the tensor is small, resident, or of a kind that a copy
    ///         of bytes does not give back; the caller keeps it then
    std::shared_ptr<Saved> save(const at::Tensor& tensor) {
      return store_->save(*this, tensor);
    }
    void end() { store_->end(*this); }

   private:
    friend class ActivationStore;
    const std::shared_ptr<ActivationStore> store_;
    std::shared_ptr<Kept> group_;  // that takes the next tensor
    std::vector<at::Tensor> leaving_;
  };

  explicit ActivationStore(Options options);
  ~ActivationStore();

  /// Begins the forward of a recomputed call. @return the name of the
  /// activations that it will keep
  ActivationId begin_forward();
  /// Takes tensors over. Those that are sent to the host lose their memory on
  /// the device, unless it has other owners. The memory is freed once the host
  /// sees that the copy is done, or when `kMaxLeaving` later calls have given
  /// their tensors. In the second case the current stream waits for the copy,
  /// and the host does not: a host that runs ahead sees no copy end before it
  /// has queued the whole forward.
  /// @param tensors  taken tensors become undefined; the others are small,
  ///                 elsewhere, not dense, leaves, or needed too soon, and stay
  ///                 with the caller
  std::shared_ptr<Kept> keep(ActivationId id, std::vector<at::Tensor>& tensors);
  /// Begins the backward of a recomputed call.
  void begin_backward(ActivationId id);
  /// Returns the tensors of `keep`, on the device; undefined if they were not
  /// taken. The current stream waits for them.
  /// @throws ValueError when a tensor was changed in place since
  std::vector<at::Tensor> tensors_of(Kept& kept);
  /// Sets the tensors whose memory stays in any case, such as parameters.
  void set_resident(const std::vector<at::Tensor>& tensors);

  Stats stats() const;

 private:
  /// The tensors of one call that are on their way to the host.
  struct Leaving {
    std::vector<at::Tensor> tensors;
    Mark copied;
  };

  ActivationId next_forward();
  void begin_task(const ActivationTask& task);
  void begin_round_if_new();
  void load_ahead(const ActivationTask& task);
  void load(ActivationId id);
  void load(Item& item);
  std::shared_ptr<Saved> save(Saving& saving, const at::Tensor& tensor);
  void end(Saving& saving);
  bool may_save(const at::Tensor& tensor) const;
  std::shared_ptr<Item> offload_storage(Saving& saving,
                                        const at::Tensor& tensor);
  at::Tensor tensor_of(Saved& saved);
  bool may_leave(const at::Tensor& tensor) const;
  std::shared_ptr<Item> offload(const at::Tensor& tensor);
  void copy_to_host(Item& item, const at::Tensor& data);
  std::shared_ptr<Item> find_shared(const void* key,
                                    const at::Tensor& tensor) const;
  void forget_left();
  void let_leave(std::vector<at::Tensor> tensors);
  void release(Kept& kept);
  void release(Saved& saved);
  void give_back(std::shared_ptr<Item> item);

  const Options options_;
  mutable std::mutex mutex_;
  HostPool pool_;
  CopyStream to_host_;
  CopyStream to_device_;
  Stats stats_;
  std::deque<Leaving> leaving_;  // their copies may still run

  int64_t step_ = -1;
  std::map<int, int> num_made_;  // recomputed calls of this step by microbatch
  std::vector<ActivationTask> tasks_;
  std::vector<ActivationTask> expected_;
  OffloadPlan plan_;
  std::map<std::pair<bool, ActivationId>, size_t> place_;  // in expected_
  std::map<ActivationId, Kept*> live_;  // their backward has not begun
  std::map<const void*, std::weak_ptr<Item>> shared_;  // by tensor or storage
  std::unordered_set<const void*> resident_;           // storages
};

}  // namespace smp::memory
