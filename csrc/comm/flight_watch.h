#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/health/fault_board.h"

namespace smp::comm {

/// Watches the collectives of devices, for which the host does not wait. A rank
/// that has left, a device that fails and a collective that does not end become
/// faults of the board. The first fault, wherever it is found, aborts the
/// groups. Kernels that wait for a lost rank then end, and with them a host
/// that waits for the device. Has one thread, which starts with the first
/// collective. Thread-safe.
class FlightWatch {
 public:
  struct Options {
    /// Longest time without an end of a watched flight while some are in
    /// flight. A large collective has more time, as in `wait_for`.
    std::chrono::milliseconds timeout = std::chrono::minutes(30);
    /// Time without an end of a flight after which the device counts as waiting
    /// for other ranks.
    std::chrono::milliseconds waits_after = std::chrono::seconds(5);
    /// Time without an end of a flight before a report. 0: never.
    std::chrono::milliseconds report_after{0};
    std::chrono::milliseconds look_every{100};
    /// Time for news of a failure, which may arrive after connections break.
    std::chrono::milliseconds grace = std::chrono::seconds(2);
    /// Runs first in the thread, which destroys events of the device.
    std::function<void()> begin_thread = [] {};
  };

  FlightWatch(std::shared_ptr<health::FaultBoard> faults, Options options);
  /// Ends the thread; operations in flight go on.
  ~FlightWatch();
  FlightWatch(const FlightWatch&) = delete;
  FlightWatch& operator=(const FlightWatch&) = delete;

  /// Adds a group to abort with the first fault. Does not keep it alive.
  void add_group(const CommunicatorPtr& group);

  /// An operation that is watched until the device has passed it.
  struct Flight {
    /// Returns whether it is over; throws when the device has failed. Holds no
    /// tensors.
    std::function<bool()> is_over;
    std::string what;        ///< "all_reduce over nccl:dp (2 ranks)"
    std::vector<int> ranks;  ///< global ranks of the group
    std::optional<health::CollectiveId> collective = {};
  };
  void add(Flight flight);

  /// Returns how many are in flight, as of the thread's last look.
  int num_in_flight() const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Entry {
    Flight flight;
    Clock::time_point since;
    std::optional<Clock::time_point> left_since = {};  // a rank of its group
  };

  void run();
  void check_flights(std::unique_lock<std::mutex>& lock);
  std::vector<Entry> take_ended();
  void look_at_oldest(std::unique_lock<std::mutex>& lock);
  std::optional<int> who_left(const Flight& flight) const;
  void abort_groups(std::unique_lock<std::mutex>& lock);
  void raise_fault(const std::string& text);

  const std::shared_ptr<health::FaultBoard> faults_;
  const Options options_;
  int token_ = 0;

  mutable std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Communicator>> groups_;
  std::vector<Entry> entries_;  // in the order of their begin
  std::string failure_;         // of the device; empty: none
  Clock::time_point moved_at_;
  bool is_reported_ = false;
  bool is_faulted_ = false;
  bool is_aborted_ = false;
  bool is_stopping_ = false;
  std::thread thread_;
};

using FlightWatchPtr = std::shared_ptr<FlightWatch>;

}  // namespace smp::comm
