#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "csrc/health/collective_log.h"

namespace smp::health {

/// Records the waits of a process's main activity and its progress. From this
/// rank 0 tells a deadlock (all ranks wait and nothing moves) from a slow rank.
/// Thread-safe.
class WaitRegistry {
 public:
  struct Snapshot {
    bool is_blocked = false;
    std::string what;      ///< the newest wait
    std::string activity;  ///< what was going on, also while nothing waits
    std::chrono::milliseconds blocked_for{0};
    int64_t progress = 0;  ///< grows with each message and each wait that ends
    int64_t num_unsent = 0;  ///< messages that are still on their way out
    std::optional<CollectiveId> collective;  ///< that the newest wait is for
    bool device_waits = false;  ///< for other ranks, and no host need wait
  };

  Snapshot snapshot() const;

  /// Returns the collectives that this process has entered; the code that
  /// enters them numbers the groups.
  CollectiveLog& collectives() { return collectives_; }

  /// Adds a count of something else that moves while this process waits, for
  /// instance finished work of a device. `count` returns a number that grows,
  /// and is called about once per second, on any thread, while this process
  /// waits. The number must not grow while nothing gets done: deadlocks would
  /// not be found.
  void add_source(std::function<int64_t()> count);

  /// Sets the words for the current work of the process, for reports; empty:
  /// none of the library. A change of words is progress, unless the process
  /// waits.
  void set_activity(std::string text);

  /// Sets whether the device has waited for other ranks for seconds. The host
  /// may then hang in a wait for the device, which this registry does not see.
  void set_device_waits(bool waits) { device_waits_ = waits; }

  void add_progress() { progress_.fetch_add(1, std::memory_order_relaxed); }
  void add_unsent(int64_t delta) { num_unsent_.fetch_add(delta); }

 private:
  friend class BlockedScope;
  using Clock = std::chrono::steady_clock;
  struct Entry {
    std::string what;
    Clock::time_point since;
    std::optional<CollectiveId> collective;
  };

  mutable std::mutex mutex_;
  std::map<int64_t, Entry> entries_;  // by id, so the newest comes last
  int64_t next_id_ = 0;
  std::atomic<int64_t> progress_{0};
  std::atomic<int64_t> num_unsent_{0};
  std::atomic<bool> device_waits_{false};
  std::string activity_;
  std::vector<std::function<int64_t()>> sources_;
  CollectiveLog collectives_;
};

/// Registers one wait. Use it only for waits that stop the main activity of the
/// process: a helper thread that sleeps while others compute is not blocked.
/// One thread at a time may use an object.
class BlockedScope {
 public:
  /// Makes a scope that is not blocked until `update`.
  explicit BlockedScope(WaitRegistry& registry) : registry_(registry) {}
  /// @param what  words for the wait: "barrier over WORLD, waiting for ranks 1
  ///              2"
  /// @param collective  collective that is waited for, if there is one
  BlockedScope(WaitRegistry& registry, const std::string& what,
               std::optional<CollectiveId> collective = std::nullopt);
  ~BlockedScope();
  BlockedScope(const BlockedScope&) = delete;
  BlockedScope& operator=(const BlockedScope&) = delete;

  /// Begins, renames or ends the wait; its time counts from its begin.
  /// @param goes_on  whether a new wait continues the last one: the work that
  ///                 this process did in between was not what it waited for
  void update(bool is_blocked, const std::string& what, bool goes_on = false);

 private:
  WaitRegistry& registry_;
  std::optional<CollectiveId> collective_;
  WaitRegistry::Clock::time_point since_;  // begin of the last wait
  int64_t id_ = -1;
};

}  // namespace smp::health
