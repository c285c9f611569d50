#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/pipeline/messenger.h"
#include "csrc/pipeline/module_table.h"
#include "csrc/pipeline/operation.h"
#include "csrc/pipeline/result_cache.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/tensor_directory.h"

namespace smp::pipeline {

/// A call as its caller issued it.
struct IssuedCall {
  int owner_rank = -1;  ///< global rank that runs the module
  int64_t module_id = 0;
  int64_t request_id = 0;
  int64_t visit = 0;
  std::shared_ptr<ResultCache::Forward> expected;
  std::vector<RemoteRefPtr> results;
};

/// Makes the requests of this rank's contexts to other ranks, receives the
/// answers, and predicts the results of calls that were seen before. Belongs to
/// the thread that holds the baton, except for `take` and `clear`.
class Caller {
 public:
  /// @param runs_ahead  whether a call that was seen before returns at once.
  ///     Peers that agree on an order must suspend at the same places, and what
  ///     was seen before may differ between them
  Caller(bool runs_ahead, const ModuleTable& modules, Messenger& messenger,
         Scheduler& scheduler, TensorDirectory& tensors);

  /// Asks the owner of a module to run it. Returns as soon as the kind of the
  /// result is known: at once if a call like this one was seen before.
  /// @param mode  state besides module, structure and tensors on which the
  ///     result depends (autocast, frozen parameters ...)
  IssuedCall call_forward(int owner_rank, int64_t module_id, int64_t flags,
                          const std::string& structure, const std::string& mode,
                          const std::vector<at::Tensor>& inputs);
  /// Sends the gradients of a call's results; undefined where there is none.
  /// @return refs of the gradients of its tensors; null where there is none
  std::vector<RemoteRefPtr> call_backward(const IssuedCall& call,
                                          const std::vector<TensorMeta>& inputs,
                                          const std::vector<at::Tensor>& grads);
  /// Computes an operation where the tensors are; all are refs of one shape and
  /// dtype.
  RemoteRefPtr call_operation(const Operation& operation,
                              const std::vector<RemoteRefPtr>& inputs);

  /// Returns the seeds of the next calls of this context, if it calls these
  /// modules of other ranks one by one.
  std::vector<int64_t> seeds_of_next_calls(
      const std::vector<int64_t>& module_ids) const;
  /// Counts calls that were made as a part of another call.
  void skip_calls(int num_calls);

  /// Ends a context: fetches the tensors that outlive it, and waits until the
  /// other ranks have done all its requests.
  void finish(Context& context);

  /// Takes a message of kind kForwardMeta, kBackwardMeta or kRequestsDone.
  void take(const Header& header, mailbox::Message&& message);
  void clear();

  TensorDirectory& tensors() const { return tensors_; }
  int64_t num_requests() const { return num_requests_; }

 private:
  struct AckWait {
    std::map<int, int64_t> issued;
    std::shared_ptr<Slot> slot;
  };

  void check_arguments(int64_t module_id,
                       const std::vector<at::Tensor>& inputs) const;
  Header request_header(Context& context, Kind kind);
  void send_request(Context& context, int owner, Header& header,
                    const std::string& structure,
                    std::vector<mailbox::MessageTensor> tensors,
                    std::shared_ptr<Slot> slot);
  mailbox::Message wait_for_meta(int owner, const Header& header,
                                 const std::shared_ptr<Slot>& slot,
                                 const char* waits_for);
  std::vector<RemoteRefPtr> name_results(Context& context, const Header& header,
                                         const IssuedCall& call,
                                         const std::shared_ptr<Route>& route,
                                         const Route::Hops& hops);
  void await_requests(Context& context);
  void take_done(const Header& header, int owner);

  const bool runs_ahead_;
  const ModuleTable& modules_;
  Messenger& messenger_;
  Scheduler& scheduler_;
  TensorDirectory& tensors_;
  ResultCache results_;
  std::atomic<int64_t> next_context_id_{1};
  std::atomic<int64_t> num_requests_{0};
  std::mutex mutex_;  // guards what follows; locked before the scheduler's
  std::unordered_map<int64_t, std::shared_ptr<Slot>> requests_;
  std::unordered_map<int64_t, std::map<int, int64_t>> acks_;  // by context
  std::unordered_map<int64_t, AckWait> ack_waits_;
};

}  // namespace smp::pipeline
