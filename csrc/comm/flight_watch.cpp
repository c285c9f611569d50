#include "csrc/comm/flight_watch.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "csrc/comm/group_wait.h"
#include "csrc/common/check.h"
#include "csrc/common/log.h"
#include "csrc/common/without_gil.h"
#include "csrc/common/without_throwing.h"
#include "csrc/health/fault_aware_wait.h"
#include "csrc/health/thread_name.h"

namespace smp::comm {

using std::chrono::milliseconds;

FlightWatch::FlightWatch(std::shared_ptr<health::FaultBoard> faults,
                         Options options)
    : faults_(std::move(faults)), options_(options), moved_at_(Clock::now()) {
  SMP_CHECK_VALUE(faults_, "FlightWatch: expected a fault board, got none");
  const auto notify = [this] {
    {
      const std::lock_guard lock(mutex_);
      is_faulted_ = faults_->fault().has_value();
    }
    changed_.notify_all();
  };
  token_ = faults_->subscribe(notify);
  notify();
}

FlightWatch::~FlightWatch() {
  faults_->unsubscribe(token_);
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  without_gil([this] {
    if (thread_.joinable()) thread_.join();
    entries_.clear();
  });
}

void FlightWatch::add_group(const CommunicatorPtr& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& one) { return one.expired(); });
  groups_.push_back(group);
}

void FlightWatch::add(Flight flight) {
  const std::lock_guard lock(mutex_);
  if (is_aborted_ || is_stopping_) return;
  const Clock::time_point now = Clock::now();
  if (entries_.empty()) moved_at_ = now;
  entries_.push_back({std::move(flight), now});
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

int FlightWatch::num_in_flight() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(entries_.size());
}

void FlightWatch::run() {
  health::name_this_thread("smp-flights");
  options_.begin_thread();
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    if (is_faulted_ && !is_aborted_) {
      abort_groups(lock);
    } else if (!is_aborted_) {
      check_flights(lock);
    }
    changed_.wait_for(lock, options_.look_every, [this] {
      return is_stopping_ || (is_faulted_ && !is_aborted_);
    });
  }
}

// Aborts the groups, which ends everything in flight; it is not watched any
// more.
void FlightWatch::abort_groups(std::unique_lock<std::mutex>& lock) {
  is_aborted_ = true;
  faults_->waits().set_device_waits(false);
  const std::vector<std::weak_ptr<Communicator>> groups = groups_;
  std::vector<Entry> dropped = std::exchange(entries_, {});
  lock.unlock();
  for (const auto& group : groups) {
    without_throwing("the abort of a group", [&] {
      if (const CommunicatorPtr alive = group.lock()) alive->abort();
    });
  }
  dropped.clear();
  lock.lock();
}

void FlightWatch::check_flights(std::unique_lock<std::mutex>& lock) {
  std::vector<Entry> ended = take_ended();
  if (!ended.empty()) {
    moved_at_ = Clock::now();
    is_reported_ = false;
    for (size_t i = 0; i < ended.size(); ++i) faults_->waits().add_progress();
  }
  if (!failure_.empty()) {
    const std::string text = std::exchange(failure_, {});
    lock.unlock();
    raise_fault(text);
    lock.lock();
    return;
  }
  look_at_oldest(lock);
}

std::vector<FlightWatch::Entry> FlightWatch::take_ended() {
  const auto is_in_flight = [this](const Entry& entry) {
    try {
      return !entry.flight.is_over();
    } catch (const std::exception& error) {
      if (failure_.empty()) {
        failure_ = detail::concat(entry.flight.what, ": ", error.what());
      }
      return false;
    }
  };
  std::vector<Entry> ended;
  const auto first_ended =
      std::stable_partition(entries_.begin(), entries_.end(), is_in_flight);
  std::move(first_ended, entries_.end(), std::back_inserter(ended));
  entries_.erase(first_ended, entries_.end());
  return ended;
}

std::optional<int> FlightWatch::who_left(const Flight& flight) const {
  if (flight.collective) {
    return faults_->goodbyes().rank_left_before(*flight.collective);
  }
  for (const int global_rank : flight.ranks) {
    if (faults_->has_left(global_rank)) return global_rank;
  }
  return std::nullopt;
}

void FlightWatch::look_at_oldest(std::unique_lock<std::mutex>& lock) {
  if (entries_.empty()) return faults_->waits().set_device_waits(false);
  Entry& oldest = entries_.front();
  const Clock::time_point now = Clock::now();
  if (const std::optional<int> left = who_left(oldest.flight)) {
    if (!oldest.left_since) oldest.left_since = now;
    if (now - *oldest.left_since < options_.grace) return;
    const std::string what = "the " + oldest.flight.what + " on the device";
    lock.unlock();
    try {
      health::fail_because_left(*faults_, *left, what);
    } catch (const Error& error) {  // it is on the board
      SMP_LOG(kError, error.what());
    }
    lock.lock();
    return;
  }
  const auto still = std::chrono::duration_cast<milliseconds>(
      now - std::max(oldest.since, moved_at_));
  faults_->waits().set_device_waits(still >= options_.waits_after);
  const std::string text = detail::concat(
      "the device has waited ", still.count(), " ms for the ",
      oldest.flight.what, ", the first of ", entries_.size(),
      " collectives in flight; did every rank of the group come so far?");
  if (still >= options_.timeout + time_by_size(oldest.flight.collective)) {
    lock.unlock();
    raise_fault(text);
    lock.lock();
  } else if (options_.report_after.count() > 0 && !is_reported_ &&
             still >= options_.report_after) {
    is_reported_ = true;
    SMP_LOG(kWarning, text);
  }
}

// Reports the fault. No wait raises it here before the host returns from the
// device.
void FlightWatch::raise_fault(const std::string& text) {
  SMP_LOG(kError, text);
  faults_->report({.kind = health::Fault::Kind::kRaised,
                   .global_rank = faults_->global_rank(),
                   .where = "a collective of the device",
                   .text = text});
}

}  // namespace smp::comm
