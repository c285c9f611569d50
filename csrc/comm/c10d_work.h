#pragma once

#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "csrc/comm/c10d_communicator.h"
#include "csrc/comm/communicator.h"
#include "csrc/comm/communicator_checks.h"
#include "csrc/health/wait_watch.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace smp::comm {

using C10dBackendPtr = c10::intrusive_ptr<c10d::Backend>;
using C10dWorkPtr = c10::intrusive_ptr<c10d::Work>;

/// The state that a communicator over a torch.distributed backend shares with
/// its works; lives as long as any of them.
struct C10dShared {
  C10dShared(C10dBackendPtr backend, C10dOptions options);
  ~C10dShared();

  /// Ends the connections of the backend, and its kernels with them; returns at
  /// once. Several groups have to end at the same time: freeing the memory of
  /// one may wait for the kernels of the others.
  void abort_backend();
  /// Ends the backend after its last operation, and waits until it has ended.
  /// Not after `abort_backend`.
  void shut_down_backend() noexcept;

  C10dBackendPtr backend;
  const bool is_gloo;
  health::WaitWatch watch;
  std::mutex issue_mutex;  ///< c10d counts operations without a lock

  /// Works that were given up while in flight. The backend still uses their
  /// tensors, and a message for a freed buffer would break it.
  std::mutex mutex;
  std::vector<C10dWorkPtr> messages;
  std::vector<C10dWorkPtr> collectives;

 private:
  // Ends collectives that still run in Gloo's threads, because the backend's
  // destructor waits for these. A receive that times out inside Gloo closes all
  // connections of the group; only here is that intended.
  // @return false if a collective still runs: Gloo does not wake a collective
  //         whose bytes are on their way when its connection is closed
  bool end_collectives();
  bool some_collective_runs() const;

  void end();

  using End = void (*)(c10d::Backend& backend, const C10dOptions& options);
  void begin_end(End end);
  void await_end();

  const C10dOptions options_;
  std::shared_future<void> ended_;  // valid once an end has begun
  std::thread ender_;
};

using C10dSharedPtr = std::shared_ptr<C10dShared>;

/// Makes the work of a send or receive of Gloo.
WorkPtr make_message_work(C10dSharedPtr shared, CallName call,
                          C10dWorkPtr inner);

/// Makes the work of a collective of Gloo.
/// @param finish  run by the first `wait` that succeeds; may be empty
WorkPtr make_collective_work(C10dSharedPtr shared, CallName call,
                             C10dWorkPtr inner, std::function<void()> finish);

/// Makes the work of a backend whose works can be polled, such as NCCL.
/// @param tensors  tensors of the operation, kept as long as the work
WorkPtr make_polled_work(C10dSharedPtr shared, CallName call, C10dWorkPtr inner,
                         std::vector<at::Tensor> tensors);

/// Returns the text of an exception, without a stack trace.
std::string reason_of(const std::exception_ptr& failure);

}  // namespace smp::comm
