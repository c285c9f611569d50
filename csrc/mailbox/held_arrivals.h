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

/// Messages whose tensors are taken from a lane whose `take` may block, and
/// later messages of the same ranks. A thread of its own takes and delivers
/// them, in the order of each rank, so that no receiving thread is blocked.
/// They count as unsent: a rank that waits for them is in no deadlock.
/// Thread-safe.
class HeldArrivals {
 public:
  /// Gives the tensors of a message their data; an exception is a fault.
  using Take = std::function<void(Message& message)>;

  /// Makes it for `owner`, whose `deliver` gets the messages.
  HeldArrivals(const LinkOwner& owner, int world_size, Take take);
  /// Calls `end`.
  ~HeldArrivals();

  /// Keeps a message if it `must_wait` or an earlier message of its rank waits.
  /// Call it in the order in which messages of a rank come. After `begin_end`
  /// the message is given up instead.
  /// @return false when it need not wait: it is still the caller's
  bool hold(Message& message, bool must_wait);

  int64_t num_held() const;

  /// Gives up waiting messages and later ones of their ranks. A handler that
  /// already runs goes on.
  void begin_end();
  /// Joins the thread. The caller must end a `take` that is blocked.
  void end();

 private:
  struct Source {
    std::deque<Message> waiting;
    // Earlier messages were given up, so no later one may be delivered.
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
