#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "csrc/pipeline/context.h"
#include "csrc/pipeline/messenger.h"
#include "csrc/pipeline/remote_ref.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/tensor_store.h"

namespace smp::pipeline {

/// Locates the tensors of a step: names of arguments and results, their data on
/// this rank, and orders that bring data from rank to rank.
///
/// Functions that get a context, and those that fetch, belong to the thread
/// that holds the baton; the others are thread-safe and wait for nothing.
class TensorDirectory {
 public:
  /// Makes tensors without data for tensors elsewhere.
  using HandleFactory =
      std::function<std::vector<at::Tensor>(const std::vector<TensorMeta>&)>;
  struct Stats {
    int64_t pushes = 0;   ///< orders to send data on
    int64_t fetches = 0;  ///< waits of this rank for data of another one
  };

  /// @param calls_itself  this rank has several stages, which send requests to
  ///     each other
  TensorDirectory(c10::Device device, bool calls_itself, Messenger& messenger,
                  Scheduler& scheduler);

  /// Sets the factory. Without one, results of remote calls are fetched at
  /// once.
  void set_handle_factory(HandleFactory factory);

  // Names that contexts of this rank give.

  /// Returns a new number for a request, or for a tensor that becomes an
  /// argument.
  int64_t next_id() { return next_id_++; }
  /// Names an argument of a request and has its data sent to `dst`.
  mailbox::MessageTensor address(Context& context, int dst,
                                 const at::Tensor& tensor);
  mailbox::MessageTensor address_ref(Context& context, int dst, RemoteRef& ref);
  /// Names a result of a request.
  /// @param hops  ranks to which its owner sends it unasked
  RemoteRefPtr name_result(Context& context, const Header& request, int owner,
                           int idx, const TensorMeta& meta,
                           const std::shared_ptr<Route>& route,
                           const Route::Hops& hops);
  /// Keeps a copy of a tensor made here for ranks that want to see it.
  RemoteRefPtr keep(Context& context, const at::Tensor& tensor);
  /// Returns refs that `holder` has and this rank names no more; for the next
  /// request.
  std::vector<mailbox::Ref> take_released(int holder, int64_t mb);

  // Data behind names.

  /// Returns the data of a ref, on the device; waits for them.
  at::Tensor fetch(const RemoteRefPtr& ref);
  /// Returns the data of a ref for a caller that may write to them.
  at::Tensor fetch_to_own(const RemoteRefPtr& ref);
  /// Makes tensors for Python that represent the refs (without a factory: their
  /// data); undefined for null.
  std::vector<at::Tensor> make_handles(const std::vector<RemoteRefPtr>& refs);
  at::Tensor make_handle(const RemoteRefPtr& ref) {
    return make_handles({ref}).front();
  }
  /// Fetches the tensors that outlive a context: they must not depend on other
  /// ranks.
  void settle(Context& context);
  /// Returns the data on the device, for the current stream, which waits for
  /// them.
  at::Tensor use(memory::MarkedTensor tensor) const;

  // Data that requests of other ranks name.

  void put(const mailbox::Ref& ref, int64_t mb, memory::MarkedTensor tensor);
  void when_available(const mailbox::Ref& ref, int64_t mb,
                      TensorStore::Callback callback);
  void release(const mailbox::Ref& ref, int64_t mb);
  /// Stores results under the names that the caller gave them and sends them
  /// on. Undefined results are left out.
  void offer(const Header& request, int caller,
             const std::vector<at::Tensor>& results, const Route::Hops& hops);

  /// Takes a message of kind kPush, kRelease or kData.
  void take(const Header& header, mailbox::Message&& message);
  void begin_step();
  void end_microbatch(int mb);
  void clear();
  /// Clears the store and drops the factory.
  void close();

  Stats stats() const { return {num_pushes_, num_fetches_}; }
  int64_t num_stored() const { return store_.size(); }

 private:
  void order_push(RemoteRef& ref, int dst);
  void push(const mailbox::Ref& ref, int64_t mb, int dst);
  void drain_releases(int64_t mb);
  bool has_ended(int64_t mb) const;

  const c10::Device device_;
  const bool calls_itself_;
  Messenger& messenger_;
  Scheduler& scheduler_;
  HandleFactory handle_factory_;
  TensorStore store_;
  const std::shared_ptr<ReleaseList> releases_;
  std::map<int, std::vector<mailbox::Ref>> to_release_;  // with the baton
  std::atomic<int64_t> next_id_{1};
  std::atomic<int64_t> num_pushes_{0};
  std::atomic<int64_t> num_fetches_{0};
  mutable std::mutex mutex_;
  std::set<int64_t> ended_;  // microbatches of this step
};

}  // namespace smp::pipeline
