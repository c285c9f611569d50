#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace smp::shm {

/// Wakes one sleeping thread, of this process or of another process that maps
/// the same memory. Zeroed memory is a doorbell without sleepers.
///
/// Two threads may sleep here, each in its own seat, and one seat is
/// registered. A ring wakes the thread in the registered seat, and the other
/// sleeps on. Seats thus change by two atomic writes, without waking a thread.
///
/// The sleeper calls `prepare`, then looks whether there is work, then calls
/// `sleep` or `cancel`. A thread that makes work stores it with sequential
/// consistency (or under a lock that the sleeper's look takes) and calls
/// `ring`. So either the sleeper sees the work, or the ringer sees the sleeper.
class alignas(64) Doorbell {
 public:
  enum class Seat : uint32_t { kFirst = 1, kSecond = 2 };

  /// Wakes the registered seat; any thread. Costs one atomic read if there is
  /// none.
  void ring();

  /// Registers a seat. @return the count to pass to `sleep`
  uint32_t prepare(Seat seat = Seat::kFirst);
  /// Returns the same count without registering the seat: a ring reaches it
  /// only if another thread registers it later.
  uint32_t watch(Seat seat) const { return count_of(seat).load(); }
  /// Ends the registration of any seat.
  void cancel() { registered_.store(0); }
  /// Returns when rung in this seat since `prepare` or `watch`, at the
  /// time-out, or spuriously.
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
