#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/mailbox/link.h"
#include "csrc/mailbox/message.h"

namespace smp::mailbox {

/// Messages that have come and wait until their tensors are taken from a lane
/// whose `take` may block, and what has come from the same ranks since. A
/// thread of its own takes and delivers them, in the order of each rank, so
/// that no thread that receives is blocked. They count as unsent: who waits for
/// them is in no deadlock. Thread-safe.
class HeldArrivals {
 public:
  /// Gives the tensors of a message their data; what it throws is a fault.
  using Take = std::function<void(Message& message)>;

  /// Messages go to `owner.deliver`.
  HeldArrivals(const LinkOwner& owner, int world_size, Take take);
  /// Calls `end`.
  ~HeldArrivals();

  /// Keeps a message that `must_wait`, or behind which one of its rank does.
  /// In the order in which those of a rank come. After `begin_end` it is given
  /// up instead.
  /// @return false when it need not wait: it is still the caller's
  bool hold(Message& message, bool must_wait);

  int64_t num_held() const;

  /// What waits is given up, and what comes behind it. Only a handler that runs
  /// already goes on.
  void begin_end();
  /// Joins the thread. A `take` that is blocked must end by something else.
  void end();

 private:
  struct Source {
    std::deque<Message> waiting;
    // What it has sent was given up, so nothing that follows may be delivered.
    bool is_cut = false;
  };

  void run();
  void deliver_first(std::unique_lock<std::mutex>& lock, Source& source);
  bool take(Message& message);

  const LinkOwner owner_;
  const Take take_;
  mutable std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::vector<Source> sources_;  // by global rank
  int64_t num_held_ = 0;
  std::atomic<bool> is_ending_{false};  // set with `mutex_`
  std::thread thread_;                  // begins with the first that waits
};

}  // namespace smp::mailbox
