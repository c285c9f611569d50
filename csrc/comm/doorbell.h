#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace smp::comm {

/// Wakes one sleeping thread, of this process or of another one that maps the
/// same memory. Zeroed memory is a doorbell that nobody sleeps at.
///
/// The sleeper calls `prepare`, then looks whether there is something to do,
/// then `sleep` or `cancel`. Whoever makes something to do stores it with
/// sequential consistency (or under a lock that the sleeper's look takes) and
/// calls `ring`. So either the sleeper sees it, or the ringer sees the sleeper.
class alignas(64) Doorbell {
 public:
  /// Any thread. Two atomic reads when nobody sleeps.
  void ring();

  void prepare() { is_sleeping_.store(1); }
  void cancel() { is_sleeping_.store(0); }
  /// Returns when rung since `prepare`, at the time-out, or for no reason.
  void sleep(std::optional<std::chrono::milliseconds> timeout);

 private:
  std::atomic<uint32_t> is_sleeping_{0};
};

}  // namespace smp::comm
