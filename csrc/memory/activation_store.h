#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/memory/copy_stream.h"
#include "csrc/memory/host_pool.h"
#include "csrc/memory/offload_plan.h"

namespace smp::memory {

/// Keeps the tensors that recomputed calls need for their backward in host
/// memory until then.
///
/// A step is a list of tasks, forwards and backwards of recomputed calls. The
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
    int64_t min_bytes = 1 << 20;  ///< smaller tensors stay
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

  Stats stats() const;

 private:
  /// The tensors of one call that are on their way to the host.
  struct Leaving {
    std::vector<at::Tensor> tensors;
    Mark copied;
  };

  void begin_task(const ActivationTask& task);
  void begin_round_if_new();
  void load_ahead(const ActivationTask& task);
  void load(ActivationId id);
  void load(Item& item);
  bool may_leave(const at::Tensor& tensor) const;
  std::shared_ptr<Item> offload(at::Tensor& tensor);
  std::shared_ptr<Item> find_shared(const at::Tensor& tensor) const;
  void forget_left();
  void let_leave(std::vector<at::Tensor> tensors);
  void release(Kept& kept);

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
  std::map<const void*, std::weak_ptr<Item>> shared_;  // by tensor
};

}  // namespace smp::memory
