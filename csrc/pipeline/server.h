#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "csrc/comm/fault_board.h"
#include "csrc/comm/mailbox.h"
#include "csrc/pipeline/call_record.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/structure_cache.h"
#include "csrc/pipeline/wire.h"

namespace smp::pipeline {

/// A module call as its owner sees it, or its result as the caller sees it.
struct Call {
  int64_t module_id = 0;
  int64_t mb = 0;
  int64_t flags = 0;      ///< of wire.h
  std::string structure;  ///< pickled arguments or results without tensors
  std::vector<comm::MessageTensor> tensors;
};

/// Identifies a forward request for its backward.
struct CallId {
  int owner_rank = -1;  ///< global rank that ran the module
  int64_t request_id = 0;
};

/// One rank's part in the pipeline: runs step bodies and serves the requests
/// of other ranks, both as contexts that take turns (see Scheduler).
/// Source: the module server of the public smp v1 guide ("core features");
/// contexts, messages and order are our design (docs/design/foundations.md).
class Server {
 public:
  struct Options {
    int global_rank = 0;
    std::vector<int> pp_ranks;     ///< global ranks of this replica
    std::vector<int> order_ranks;  ///< dp peers of this rank, leader first
    std::string policy = "interleaved";
    int active_microbatches = 0;  ///< 0: the policy's default
    bool deterministic = false;
    c10::Device device = c10::Device(c10::DeviceType::CPU);
    std::chrono::milliseconds timeout = std::chrono::minutes(30);
    /// How long contexts may take to unwind after a failure elsewhere.
    std::chrono::milliseconds unwind_timeout = std::chrono::seconds(5);
    std::vector<std::string> module_names;  ///< by module id, for errors
  };

  /// Runs a module on its owner; called in a context with the call's tensors
  /// as autograd leaves on the device, grad mode set.
  using ForwardHandler = std::function<Call(Call)>;
  /// Tells the other ranks of an exception in a context.
  using ErrorReporter =
      std::function<void(const std::string& where, const std::string& what)>;
  using MicrobatchDone = std::function<void(int mb)>;

  Server(Options options, std::shared_ptr<comm::Mailbox> mailbox,
         std::shared_ptr<comm::FaultBoard> faults,
         ContextThreads::Enter thread_enter = {});
  ~Server();  // calls close()

  void set_forward_handler(ForwardHandler handler);
  void set_error_reporter(ErrorReporter reporter);
  /// Called (from any thread) when all backward work of a microbatch is over.
  void set_microbatch_done(MicrobatchDone done);

  bool is_driver() const { return pp_rank_ == 0; }

  /// Opens the next step on all ranks of the replica. Blocks on other ranks
  /// until the driver has come as far.
  /// @param name   of the step function; must agree on all ranks
  /// @param num_microbatches  how many pieces the batch has here
  /// @return the number of microbatches of the driver, which counts
  int begin_step(const std::string& name, int num_microbatches);

  /// Runs `body` once per microbatch and serves until the driver ends the
  /// step. @param seed  of this step, the same on all ranks of the replica
  /// Raises what a body raised, or PeerFailure when another rank failed.
  void run_step(int num_microbatches, uint64_t seed,
                std::function<void(int mb)> body);

  // In a context of this rank:

  /// Runs a module on the rank that owns it and returns its results.
  std::pair<Call, CallId> call_forward(int owner_global_rank, Call call);
  /// Sends the gradients of a call's results, returns those of its tensors.
  std::vector<at::Tensor> call_backward(const CallId& id,
                                        const std::vector<at::Tensor>& grads);
  /// Driver: hands the root module's result to the other ranks.
  void publish_output(const Call& output);
  /// Others: waits for it.
  Call await_output();
  /// Driver: the policy may now let others run before this backward.
  void begin_backward();
  /// Driver: tells the others that one model.backward is over.
  void end_backward();
  /// Others: waits until the driver's model.backward is over.
  void await_backward();

  Scheduler::Stats scheduler_stats() const { return scheduler_.stats(); }
  std::vector<TaskKey> executed_order() const {
    return scheduler_.executed_order();
  }
  int64_t num_remote_calls() const { return num_remote_calls_; }
  int64_t num_served_calls() const { return num_served_calls_; }
  int64_t num_records() const { return records_.size(); }

  /// Ends threads; nothing is sent afterwards. May be called twice.
  void close();

 private:
  using SlotKey = std::tuple<Kind, int64_t, int64_t>;  // kind, mb, index

  void on_message(comm::Message&& message);
  void take_message(comm::Message&& message);
  void handle_locked(const Header& header, comm::Message&& message,
                     std::vector<std::function<void()>>& after);
  void serve_forward(const Header& header, comm::Message& message);
  void serve_backward(const Header& header, comm::Message& message);
  void run_forward(const Header& header, int caller, Call& call);
  void run_backward(const Header& header, int caller,
                    const std::vector<comm::MessageTensor>& grads);
  void post(int dst, const Header& header, const std::string& structure,
            std::vector<comm::MessageTensor> tensors);
  void post_to_others(const Header& header);
  comm::Message request(int owner, Header header, const std::string& structure,
                        std::vector<comm::MessageTensor> tensors,
                        const char* waits_for);
  comm::Message await_notice(Kind kind, int64_t index, const char* waits_for);
  Header header_of(Kind kind, int64_t mb) const;
  at::Tensor to_device(at::Tensor tensor) const;
  void finish_body(int mb);
  void finish_microbatch(int mb);
  Scheduler::StepOptions step_options(int num_microbatches) const;
  void replay_early_messages();
  [[noreturn]] void abandon_step(std::exception_ptr failure);
  void wait_until(std::unique_lock<std::mutex>& lock,
                  const std::function<bool()>& done);
  std::vector<int> ranks_needed() const;
  std::string describe_wait() const;
  void on_fault();
  void on_context_error(const Context& context, const std::exception_ptr&);
  std::string describe_task(Phase phase, int64_t mb, int64_t module_id) const;
  std::string module_name(int64_t module_id) const;
  int driver_rank() const { return options_.pp_ranks.front(); }

  const Options options_;
  int pp_rank_ = 0;
  const std::shared_ptr<comm::Mailbox> mailbox_;
  const std::shared_ptr<comm::FaultBoard> faults_;
  const std::unique_ptr<Policy> policy_;
  ContextThreads threads_;
  Scheduler scheduler_;
  StructureCache structures_;
  CallRecords records_;

  ForwardHandler forward_handler_;
  ErrorReporter error_reporter_;
  MicrobatchDone microbatch_done_;
  int fault_subscription_ = -1;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t step_ = -1;  // of the step that is open or was open last
  std::atomic<bool> in_step_{false};  // between run_step's begin and end
  bool closed_ = false;
  std::deque<comm::Message> early_;  // of steps that have not begun here
  std::map<int64_t, comm::Message> step_begins_;
  std::unordered_map<int64_t, Slot*> requests_;  // by request id
  std::map<SlotKey, Slot> notices_;
  std::atomic<bool> step_end_seen_{false};
  int64_t next_request_id_ = 1;
  std::atomic<int64_t> next_ref_id_{1};
  std::atomic<int64_t> num_remote_calls_{0};
  std::atomic<int64_t> num_served_calls_{0};
};

}  // namespace smp::pipeline
