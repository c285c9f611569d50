#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "csrc/health/fault_board.h"
#include "csrc/mailbox/mailbox.h"
#include "csrc/pipeline/announcements.h"
#include "csrc/pipeline/callee.h"
#include "csrc/pipeline/caller.h"
#include "csrc/pipeline/messenger.h"
#include "csrc/pipeline/module_table.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/server_options.h"
#include "csrc/pipeline/steps.h"
#include "csrc/pipeline/tensor_directory.h"
#include "csrc/pipeline/timeline.h"
#include "csrc/pipeline/weight_tasks.h"

namespace smp::pipeline {

/// One rank's part in the pipeline: makes its owners and connects them to
/// mailbox and fault board. It runs step bodies and serves the requests of
/// other ranks, both as contexts that take turns (see Scheduler). Calls of
/// modules elsewhere return at once; their results are refs until the data are
/// needed (docs/design/pipeline.md, docs/design/server.md).
/// Source: the module server of the public smp v1 guide ("core features");
/// contexts, messages, refs and order are our design.
class Server {
 public:
  using Options = ServerOptions;

  /// Counts since the beginning, without messages to this rank itself.
  struct Stats {
    int64_t headers = 0;  ///< messages of this server
    int64_t requests = 0;
    int64_t pushes = 0;   ///< orders to send data on
    int64_t fetches = 0;  ///< waits of this rank for data of another one
    std::map<int, int64_t> data_bytes;  ///< tensors, by destination
  };

  /// Reports an exception in a context to the other ranks.
  using ErrorReporter =
      std::function<void(const std::string& where, const std::string& what)>;

  Server(Options options, std::shared_ptr<mailbox::Mailbox> mailbox,
         std::shared_ptr<health::FaultBoard> faults,
         ContextThreads::Enter thread_enter = {});
  ~Server();  // calls close()

  void set_error_reporter(ErrorReporter reporter);
  /// Adds the modules of a further model; between steps, and in one order on
  /// all ranks of the replica.
  /// @param chunk_idxs  chunk of each module
  /// @param depth  number of ranks that the data pass before this one; -1: the
  ///     number of ranks before it in `pp_ranks`
  /// @return the id of its first module, the others follow
  int64_t add_modules(const std::vector<std::string>& names,
                      const std::vector<int>& chunk_idxs, int depth = -1);

  Steps& steps() { return steps_; }
  Caller& caller() { return caller_; }
  Callee& callee() { return callee_; }
  TensorDirectory& tensors() { return tensors_; }
  Announcements& announcements() { return announcements_; }

  bool is_driver() const { return messenger_.is_driver(); }
  int global_rank() const { return options_.global_rank; }
  const std::vector<std::string>& module_names() const {
    return modules_.names();
  }
  const Scheduler& scheduler() const { return scheduler_; }
  Stats stats() const;
  int64_t num_served_calls() const { return callee_.num_served_calls(); }
  int64_t num_records() const { return callee_.num_records(); }
  int64_t num_stored() const { return tensors_.num_stored(); }
  int64_t num_queued() const { return callee_.num_queued(); }
  int num_threads() const { return threads_.num_threads(); }

  /// Ends threads; nothing is sent afterwards. May be called twice.
  void close();

 private:
  void publish_order(int64_t step, const TaskKey& key);
  void on_message(mailbox::Message&& message);
  void on_fault();
  void on_context_error(const Context& context, const std::exception_ptr&);

  const Options options_;
  const std::shared_ptr<mailbox::Mailbox> mailbox_;
  const std::shared_ptr<health::FaultBoard> faults_;
  const std::unique_ptr<Policy> policy_;
  const std::shared_ptr<Timeline> timeline_;
  ErrorReporter error_reporter_;
  int fault_subscription_ = -1;
  std::atomic<bool> closed_{false};

  // Each member may use those above it.
  ModuleTable modules_;
  Messenger messenger_;
  ContextThreads threads_;
  Scheduler scheduler_;
  TensorDirectory tensors_;
  Caller caller_;
  WeightTasks weights_;
  Callee callee_;
  Announcements announcements_;
  Steps steps_;
};

}  // namespace smp::pipeline
