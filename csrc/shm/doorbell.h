#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace smp::shm {

/// Wakes one sleeping thread, of this process or of another one that maps the
/// same memory. Zeroed memory is a doorbell that nobody sleeps at.
///
/// Two threads may sleep here, each in a seat of its own, and one of the seats
/// is registered: a ring wakes the thread in that one, and the other sleeps
/// on. So the seats change by two atomic writes, and nobody is woken for it.
///
/// The sleeper calls `prepare`, then looks whether there is something to do,
/// then `sleep` or `cancel`. A thread that makes something to do stores it with
/// sequential consistency (or under a lock that the sleeper's look takes) and
/// calls `ring`. So either the sleeper sees it, or the ringer sees the sleeper.
class alignas(64) Doorbell {
 public:
  enum class Seat : uint32_t { kFirst = 1, kSecond = 2 };

  /// Any thread. One atomic read when nobody is registered.
  void ring();

  /// Registers a seat. @return what `sleep` needs
  uint32_t prepare(Seat seat = Seat::kFirst);
  /// The same without registering it: a ring reaches it only when another
  /// thread registers it later.
  uint32_t watch(Seat seat) const { return count_of(seat).load(); }
  /// Nobody is registered.
  void cancel() { registered_.store(0); }
  /// Returns when rung in this seat since `prepare` or `watch`, at the
  /// time-out, or for no reason.
  void sleep(Seat seat, uint32_t seen,
             std::optional<std::chrono::milliseconds> timeout = {});

 private:
  std::atomic<uint32_t>& count_of(Seat seat) {
    return num_rings_[static_cast<uint32_t>(seat) - 1];
  }
  const std::atomic<uint32_t>& count_of(Seat seat) const {
    return num_rings_[static_cast<uint32_t>(seat) - 1];
  }

  std::atomic<uint32_t> registered_{0};
  std::array<std::atomic<uint32_t>, 2> num_rings_{};
};

}  // namespace smp::shm
