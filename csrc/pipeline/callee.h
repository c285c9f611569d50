#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/pipeline/call_record.h"
#include "csrc/pipeline/caller.h"
#include "csrc/pipeline/request_queues.h"
#include "csrc/pipeline/weight_tasks.h"

namespace smp::pipeline {

/// A module call as its owner sees it, or its result.
struct Call {
  int64_t module_id = 0;
  int64_t mb = 0;
  int64_t flags = 0;      ///< `Flags` of wire.h
  std::string structure;  ///< pickled arguments or results without tensors
  std::vector<mailbox::MessageTensor> tensors;
  bool has_values = false;  ///< results: see ResultMeta
};

/// Serves the requests of other ranks. Each request runs as a context of its
/// own, in the order of its caller and when its tensors are here. Data that its
/// backward needs are kept until then. Thread-safe.
class Callee {
 public:
  /// Runs a module on its owner; called in a context with the call's tensors
  /// as autograd leaves on the device, grad mode set.
  using ForwardHandler = std::function<Call(Call)>;

  /// @param caller  caller of this rank: a service may ask other ranks in turn
  /// @param weights  delays gradients of weights
  Callee(const ModuleTable& modules, Messenger& messenger, Scheduler& scheduler,
         TensorDirectory& tensors, Caller& caller, WeightTasks& weights);

  void set_forward_handler(ForwardHandler handler);

  /// Queues a message of kind kForwardRequest, kBackwardRequest or kOperation.
  /// It runs when its turn has come and all its tensors are here.
  void take(const Header& header, mailbox::Message&& message);
  void begin_step();
  /// Frees records of calls whose backward never came.
  void end_microbatch(int mb) { records_.drop_microbatch(mb); }
  void clear();
  /// Clears everything and drops the handler.
  void close();

  int64_t num_served_calls() const { return num_served_calls_; }
  int64_t num_records() const { return records_.size(); }
  int64_t num_queued() const { return queues_.size(); }
  /// Returns a text about the requests that miss tensors.
  std::string describe_queued() const { return queues_.describe(); }

 private:
  struct Request {
    Header header;
    int caller = -1;  ///< global rank
    Call call;
    Route::Hops hops;  ///< destinations of results, known beforehand
  };

  void run(Request& request);
  void run_forward(Request& request);
  void run_backward(Request& request);
  void run_operation(Request& request);
  void open_inputs(Call& call, bool grad, CallRecord& record) const;
  std::vector<at::Tensor> input_grads_of(const Request& request,
                                         const CallRecord& record,
                                         const std::vector<GraphEdge>& roots,
                                         std::vector<at::Tensor> root_grads);
  void check_expected(const Request& request, const ResultMeta& actual) const;
  void finish(const Header& header, const Service& service);

  const ModuleTable& modules_;
  Messenger& messenger_;
  Scheduler& scheduler_;
  TensorDirectory& tensors_;
  Caller& caller_;
  WeightTasks& weights_;
  ForwardHandler forward_handler_;
  CallRecords records_;
  RequestQueues queues_;
  std::atomic<int64_t> num_served_calls_{0};
  std::mutex mutex_;
  std::map<std::tuple<Phase, int64_t, int64_t>, int64_t> visits_;
};

}  // namespace smp::pipeline
