#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace smp::health {

/// Ends blocking waits from outside: at their deadline, or all of them on
/// abort. Useful for libraries whose own time-out does too much; Gloo's closes
/// every connection of the group. Thread-safe.
class WaitWatch {
 public:
  using Clock = std::chrono::steady_clock;

  WaitWatch() = default;
  ~WaitWatch();
  WaitWatch(const WaitWatch&) = delete;
  WaitWatch& operator=(const WaitWatch&) = delete;

  /// Calls `wake` once when `deadline` passes and once on abort, or at once
  /// when that has happened already, but never after the object is gone. `wake`
  /// runs on any thread and must make the wait return soon, even if the wait
  /// has not begun yet.
  class Scope {
   public:
    Scope(WaitWatch& watch, Clock::time_point deadline,
          std::function<void()> wake);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class WaitWatch;
    using Entry = std::multimap<Clock::time_point, Scope*>::iterator;

    WaitWatch& watch_;
    const std::function<void()> wake_;
    Entry entry_;
  };

  void abort();
  /// Returns whether abort was called. Takes no lock, so that `wake` and the
  /// threads it wakes may call it.
  bool aborted() const { return aborted_; }

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> aborted_ = false;
  bool stopping_ = false;
  // Waits in progress. Deadlines before `served_until_` have been dealt with.
  std::multimap<Clock::time_point, Scope*> scopes_;
  Clock::time_point served_until_ = Clock::time_point::min();
  Clock::time_point next_look_ = Clock::time_point::max();
  std::thread thread_;  // for deadlines; joined by the destructor
};

}  // namespace smp::health
