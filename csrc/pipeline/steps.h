#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "csrc/common/microbatch_listener.h"
#include "csrc/pipeline/announcements.h"
#include "csrc/pipeline/callee.h"
#include "csrc/pipeline/caller.h"
#include "csrc/pipeline/step_wait.h"
#include "csrc/pipeline/weight_tasks.h"

namespace smp::pipeline {

/// Opens and closes the steps of this rank together with the other ranks of the
/// replica, runs their bodies, ends microbatches, and passes messages of the
/// open step to the owners that they concern.
class Steps {
 public:
  /// The objects that take part in every step.
  struct Parts {
    const ModuleTable& modules;
    const Policy& policy;
    Messenger& messenger;
    Scheduler& scheduler;
    TensorDirectory& tensors;
    Caller& caller;
    Callee& callee;
    WeightTasks& weights;
    Announcements& announcements;
  };
  using Listeners = std::vector<std::shared_ptr<MicrobatchListener>>;

  Steps(const ServerOptions& options, Parts parts,
        std::shared_ptr<mailbox::Mailbox> mailbox,
        std::shared_ptr<health::FaultBoard> faults);

  /// Sets the objects that are told the end of microbatches, in this order and
  /// without delay.
  void set_listeners(Listeners listeners);
  /// Sets a function that is called (from any thread) after them.
  void set_microbatch_done(std::function<void(int mb)> done);

  /// The driver's number of microbatches, which counts, and its words.
  struct StepStart {
    int num_microbatches;
    std::string words;
  };
  /// Opens the next step on all ranks of the replica. Blocks on other ranks
  /// until the driver has come as far.
  /// @param name   name of the step function; must agree on all ranks
  /// @param num_microbatches  number of pieces of the batch here
  /// @param words  text from the driver's script for the other ranks
  StepStart begin(const std::string& name, int num_microbatches,
                  const std::string& words = "");
  /// Runs `body` once per microbatch and serves until the driver ends the step.
  /// @param seed  seed of this step, the same on all ranks of the replica
  /// Raises what a body raised, or PeerFailure when another rank failed.
  void run(int num_microbatches, uint64_t seed,
           std::function<void(int mb)> body);
  /// Begins a backward in a body of the driver: the policy may let others run
  /// first.
  void begin_backward();

  /// Takes in a message of Channel::kPipeline: at once if it belongs to the
  /// open step, else when its step begins.
  void receive(mailbox::Message&& message);
  /// Ends the backward work of a microbatch, except weight gradients that are
  /// put off: the last of these calls this function again.
  void finish_microbatch(int mb);
  /// Wakes `begin` and `run`: something that they may wait for has changed.
  void wake();
  bool is_open() const { return in_step_; }
  /// Closes this object: no step begins any more; forgets the listeners.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;

  StepOptions step_options(int num_microbatches) const;
  void dispatch(const Header& header, mailbox::Message&& message);
  void take_early_messages();
  void run_body(int mb, const std::function<void(int)>& body);
  std::exception_ptr await_end(int num_microbatches);
  void end_body(int mb);
  void take_end(int mb);
  void notify_end(int mb);
  [[noreturn]] void abandon(std::exception_ptr failure);
  void wait_until(Lock& lock, const std::function<bool()>& is_over);
  std::vector<int> ranks_needed() const;
  std::string describe_wait() const;
  bool is_driver() const { return parts_.messenger.is_driver(); }

  const ServerOptions& options_;
  const Parts parts_;
  const std::shared_ptr<health::FaultBoard> faults_;
  StepWait wait_;

  // Shared while a message is handled, which happens without `mutex_`.
  std::shared_mutex handling_;
  std::mutex mutex_;  // guards what follows; locked before the scheduler's
  std::condition_variable changed_;
  std::atomic<bool> in_step_{false};  // while `run` runs
  bool closed_ = false;
  std::deque<mailbox::Message> early_;  // of steps that have not begun here
  std::map<int64_t, mailbox::Message> begins_;
  std::map<int, int> bodies_done_;  // driver: per microbatch, over all ranks
  int num_microbatches_ended_ = 0;
  std::atomic<bool> end_seen_{false};
  Listeners listeners_;
  std::function<void(int mb)> microbatch_done_;
};

}  // namespace smp::pipeline
