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
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "csrc/health/fault_board.h"
#include "csrc/mailbox/mailbox.h"
#include "csrc/pipeline/call_record.h"
#include "csrc/pipeline/operation.h"
#include "csrc/pipeline/remote_ref.h"
#include "csrc/pipeline/request_queues.h"
#include "csrc/pipeline/result_cache.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/structure_cache.h"
#include "csrc/pipeline/tensor_store.h"
#include "csrc/pipeline/timeline.h"
#include "csrc/pipeline/wire.h"

namespace smp::pipeline {

/// A module call as its owner sees it, or its result.
struct Call {
  int64_t module_id = 0;
  int64_t mb = 0;
  int64_t flags = 0;      ///< of wire.h
  std::string structure;  ///< pickled arguments or results without tensors
  std::vector<mailbox::MessageTensor> tensors;
  bool has_values = false;  ///< results: see ResultMeta
};

/// A call as its caller issued it.
struct IssuedCall {
  int owner_rank = -1;  ///< global rank that runs the module
  int64_t module_id = 0;
  int64_t request_id = 0;
  int64_t visit = 0;
  std::shared_ptr<ResultCache::Forward> expected;
  std::vector<RemoteRefPtr> results;
};

/// What the driver's model returned, as the other ranks get it.
struct ModelOutput {
  struct Tensor {
    at::Tensor data;   ///< undefined when `ref` is set
    RemoteRefPtr ref;  ///< large ones come only when they are used
    bool requires_grad = false;
  };
  std::string structure;
  std::vector<Tensor> tensors;
};

/// One rank's part in the pipeline: runs step bodies and serves the requests
/// of other ranks, both as contexts that take turns (see Scheduler). Calls of
/// modules elsewhere return at once; their results are refs until somebody
/// needs the data (docs/design/pipeline.md).
/// Source: the module server of the public smp v1 guide ("core features");
/// contexts, messages, refs and order are our design.
class Server {
 public:
  struct Options {
    int global_rank = 0;
    std::vector<int> pp_ranks;     ///< global ranks of this replica
    std::vector<int> order_ranks;  ///< dp peers of this rank, leader first
    std::string policy = "interleaved";
    /// What this rank does, in the text form; in place of the policy.
    std::optional<std::string> actions;
    int num_chunks = 1;           ///< parts of each model on each rank
    int active_microbatches = 0;  ///< 0: the policy's default
    bool deterministic = false;
    c10::Device device = c10::Device(c10::DeviceType::CPU);
    std::chrono::milliseconds timeout = std::chrono::minutes(30);
    /// How long contexts may take to unwind after a failure elsewhere.
    std::chrono::milliseconds unwind_timeout = std::chrono::seconds(5);
    /// How long a rank may be idle because the schedule waits for something
    /// while other work is there; then it does that. At least 20 times its
    /// longest turn.
    std::chrono::milliseconds hold_back_timeout = std::chrono::seconds(10);
    /// Whoever made it may record the steps; null: the server makes its own.
    std::shared_ptr<Timeline> timeline;
  };

  /// What was sent since the beginning, without what was sent to oneself.
  struct Stats {
    int64_t headers = 0;  ///< messages of this server
    int64_t requests = 0;
    int64_t pushes = 0;   ///< orders to send data on
    int64_t fetches = 0;  ///< waits of this rank for data of another one
    std::map<int, int64_t> data_bytes;  ///< tensors, by destination
  };

  /// Runs a module on its owner; called in a context with the call's tensors
  /// as autograd leaves on the device, grad mode set.
  using ForwardHandler = std::function<Call(Call)>;
  /// Tells the other ranks of an exception in a context.
  using ErrorReporter =
      std::function<void(const std::string& where, const std::string& what)>;
  using MicrobatchDone = std::function<void(int mb)>;
  /// Makes a tensor without data that stands for one elsewhere.
  using HandleFactory = std::function<at::Tensor(const TensorMeta&)>;

  Server(Options options, std::shared_ptr<mailbox::Mailbox> mailbox,
         std::shared_ptr<health::FaultBoard> faults,
         ContextThreads::Enter thread_enter = {});
  ~Server();  // calls close()

  void set_forward_handler(ForwardHandler handler);
  void set_error_reporter(ErrorReporter reporter);
  /// Called (from any thread) when all backward work of a microbatch is over.
  void set_microbatch_done(MicrobatchDone done);
  /// Without one, results of remote calls are fetched at once.
  void set_handle_factory(HandleFactory factory);

  bool is_driver() const { return pp_rank_ == 0; }
  int global_rank() const { return options_.global_rank; }
  Timeline& timeline() const { return *timeline_; }
  const std::vector<std::string>& module_names() const { return module_names_; }

  /// Takes in the modules of a further model; between steps, and in one order
  /// on all ranks of the replica.
  /// @param chunk_idxs  one per module
  /// @param depth  how many ranks the data pass before this one; -1: as many as
  ///     there are in front of it in `pp_ranks`
  /// @return the id of its first module, the others follow
  int64_t add_modules(const std::vector<std::string>& names,
                      const std::vector<int>& chunk_idxs, int depth = -1);

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

  /// Asks the owner of a module to run it. Returns as soon as it is known what
  /// will come: at once, unless nothing like this call was seen before.
  /// @param mode  what the result depends on besides module, structure and
  ///     tensors (autocast, frozen parameters ...)
  IssuedCall call_forward(int owner_rank, int64_t module_id, int64_t flags,
                          const std::string& structure, const std::string& mode,
                          const std::vector<at::Tensor>& inputs);
  /// Seeds of the next calls of this context, if these are modules of other
  /// ranks that are called one by one.
  std::vector<int64_t> seeds_of_next_calls(
      const std::vector<int64_t>& module_ids) const;
  /// Counts calls that were made as a part of another one.
  void skip_calls(int num_calls);
  /// Sends the gradients of a call's results; undefined where there is none.
  /// @return refs of the gradients of its tensors; null where there is none
  std::vector<RemoteRefPtr> call_backward(const IssuedCall& call,
                                          const std::vector<TensorMeta>& inputs,
                                          const std::vector<at::Tensor>& grads);
  /// Computes where the tensors are; all are refs of one shape and dtype.
  RemoteRefPtr call_operation(const Operation& operation,
                              const std::vector<RemoteRefPtr>& inputs);
  /// The data of a ref, on the device; waits for them.
  at::Tensor fetch(const RemoteRefPtr& ref);
  /// The same, and the caller may write to the result.
  at::Tensor fetch_to_own(const RemoteRefPtr& ref);
  /// A tensor for Python that stands for the ref (without a factory: its data).
  at::Tensor make_handle(const RemoteRefPtr& ref);

  /// Driver: hands the root module's result to the other ranks.
  void publish_output(const std::string& structure,
                      const std::vector<at::Tensor>& tensors);
  /// Others: waits for it.
  ModelOutput await_output();
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
  std::string executed_actions() const { return scheduler_.executed_actions(); }
  Stats stats() const;
  int64_t num_served_calls() const { return num_served_calls_; }
  int64_t num_records() const { return records_.size(); }
  int64_t num_stored() const { return store_.size(); }
  int64_t num_queued() const { return queues_.size(); }
  int num_threads() const { return threads_.num_threads(); }

  /// Ends threads; nothing is sent afterwards. May be called twice.
  void close();

 private:
  using SlotKey = std::tuple<Kind, int64_t, int64_t>;  // kind, mb, index
  using Actions = std::vector<std::function<void()>>;
  struct AckWait {
    std::map<int, int64_t> issued;
    std::shared_ptr<Slot> slot;
  };

  // server.cpp: life, messages, steps
  void publish_order(int64_t step, const TaskKey& key);
  void on_message(mailbox::Message&& message);
  void take_message(mailbox::Message&& message);
  void handle_locked(const Header& header, mailbox::Message&& message,
                     Actions& after);
  void handle_done_locked(const Header& header, int owner);
  void post(int dst, Header header, const std::string& structure,
            std::vector<mailbox::MessageTensor> tensors);
  void send(int dst, const Header& header, mailbox::Message&& message);
  void post_to_others(const Header& header);
  Header header_of(Kind kind, int64_t mb) const;
  void finish_body(int mb);
  void end_microbatch_locked(int mb, Actions& after);
  void finish_microbatch(int mb);
  Scheduler::StepOptions step_options(int num_microbatches) const;
  void replay_early_messages();
  [[noreturn]] void abandon_step(std::exception_ptr failure);

  // server_calls.cpp: what contexts of this rank ask of others
  Context& calling_context(const std::string& what) const;
  void check_arguments(int64_t module_id,
                       const std::vector<at::Tensor>& inputs) const;
  Header request_header(Context& context, Kind kind);
  mailbox::MessageTensor address(Context& context, int dst,
                                 const at::Tensor& tensor);
  mailbox::MessageTensor address_ref(Context& context, int dst, RemoteRef& ref);
  void order_push(RemoteRef& ref, int dst);
  void send_request(Context& context, int owner, Header& header,
                    const std::string& structure,
                    std::vector<mailbox::MessageTensor> tensors,
                    std::shared_ptr<Slot> slot);
  mailbox::Message wait_for_meta(int owner, const Header& header,
                                 const std::shared_ptr<Slot>& slot,
                                 const char* waits_for);
  RemoteRefPtr name_result(Context& context, const Header& header, int owner,
                           int idx, const TensorMeta& meta,
                           const std::shared_ptr<Route>& route,
                           const Route::Hops& hops);
  void await_requests(Context& context);
  void settle(Context& context);
  RemoteRefPtr store_output(Context& context, const at::Tensor& tensor);
  void drain_releases(int64_t mb);
  mailbox::Message await_notice(Kind kind, int64_t index,
                                const char* waits_for);
  at::Tensor to_device(at::Tensor tensor) const;
  bool runs_ahead() const;

  // server_service.cpp: what other ranks ask of this one
  void serve(const Header& header, mailbox::Message&& message);
  void open_inputs(Call& call, bool grad, CallRecord& record) const;
  void run_forward(const Header& header, int caller, Call& call,
                   const Route::Hops& hops);
  void run_backward(const Header& header, int caller, Call& call,
                    const Route::Hops& hops);
  void run_operation(const Header& header, int caller, const Call& call,
                     const Route::Hops& hops);
  std::vector<at::Tensor> run_graph(const Header& header, int64_t module_id,
                                    const CallRecord& record,
                                    const std::vector<GraphEdge>& roots,
                                    std::vector<at::Tensor> root_grads);
  void check_expected(const Header& header, int caller,
                      const ResultMeta& actual) const;
  void offer(const Header& header, int caller,
             const std::vector<at::Tensor>& results, const Route::Hops& hops);
  void push(const mailbox::Ref& ref, int64_t mb, int dst);
  void finish_service(const Header& header, const Service& service);

  // server_weights.cpp: weight gradients that are put off
  std::optional<std::vector<at::Tensor>> begin_split_backward(
      const Header& header, int64_t module_id, const CallRecord& record,
      const std::vector<GraphEdge>& roots,
      const std::vector<at::Tensor>& root_grads);
  void add_weight_task(const Header& header, int64_t module_id,
                       std::function<void()> add_weight_grads);
  void finish_weight_task(int mb);
  bool must_wait_for_weights(int mb);

  // server_wait.cpp: waiting, faults, words
  void wait_until(std::unique_lock<std::mutex>& lock,
                  const std::function<bool()>& done);
  void run_held_back();
  std::vector<int> ranks_needed() const;
  std::string describe_wait() const;
  void on_fault();
  void on_context_error(const Context& context, const std::exception_ptr&);
  std::string describe_task(Phase phase, int64_t mb, int64_t module_id) const;
  std::string module_name(int64_t module_id) const;
  int driver_rank() const { return options_.pp_ranks.front(); }

  const Options options_;
  int pp_rank_ = 0;
  // By module id, over all models; these change between steps only.
  std::vector<std::string> module_names_;
  std::vector<int> chunk_idxs_;
  int num_models_ = 0;
  int depth_ = 0;  // of the model that came last
  const std::shared_ptr<mailbox::Mailbox> mailbox_;
  const std::shared_ptr<health::FaultBoard> faults_;
  const std::unique_ptr<Policy> policy_;
  const std::shared_ptr<Timeline> timeline_;
  ContextThreads threads_;
  Scheduler scheduler_;
  StructureCache structures_;
  CallRecords records_;
  TensorStore store_;
  RequestQueues queues_;
  const std::shared_ptr<ReleaseList> releases_;
  ResultCache results_;  // with the baton

  ForwardHandler forward_handler_;
  ErrorReporter error_reporter_;
  MicrobatchDone microbatch_done_;
  HandleFactory handle_factory_;
  int fault_subscription_ = -1;

  // Shared while a message is handled, which goes on without `mutex_`.
  std::shared_mutex handling_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t step_ = -1;  // of the step that is open or was open last
  std::atomic<bool> in_step_{false};  // between run_step's begin and end
  bool closed_ = false;
  std::deque<mailbox::Message> early_;  // of steps that have not begun here
  std::map<int64_t, mailbox::Message> step_begins_;
  std::unordered_map<int64_t, std::shared_ptr<Slot>> requests_;
  std::map<SlotKey, Slot> notices_;
  std::unordered_map<int64_t, std::map<int, int64_t>> acks_;  // by context
  std::unordered_map<int64_t, AckWait> ack_waits_;
  std::map<std::tuple<Phase, int64_t, int64_t>, int64_t> visits_;
  std::map<int, int> bodies_done_;  // driver: per microbatch, over all ranks
  // Driver: what was published stays until all bodies are over.
  std::map<int, std::vector<RemoteRefPtr>> published_;
  struct Weights {
    int num_pending = 0;
    bool others_are_done = false;  // the microbatch is over but for these
  };
  std::map<int, Weights> weights_;  // by microbatch
  int num_microbatches_ended_ = 0;
  std::set<int64_t> ended_;  // microbatches of this step
  std::atomic<bool> step_end_seen_{false};

  std::atomic<int64_t> next_request_id_{1};
  std::atomic<int64_t> next_context_id_{1};
  std::map<int, std::vector<mailbox::Ref>> to_release_;  // with the baton
  mutable std::mutex stats_mutex_;
  Stats stats_;
  std::atomic<int64_t> num_served_calls_{0};
};

}  // namespace smp::pipeline
