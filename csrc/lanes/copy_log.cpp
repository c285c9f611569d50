#include "csrc/lanes/copy_log.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace smp::lanes {
namespace {

// Longest wait for a copy. Copies of hosts take at most one second.
constexpr int64_t kLongestWaitNs = 2'000'000'000;

}  // namespace

void CopyLog::start(size_t capacity,
                    std::shared_ptr<memory::DeviceClock> clock) {
  const std::lock_guard lock(mutex_);
  capacity_ = capacity;
  clock_ = std::move(clock);
  entries_.clear();
  num_dropped_ = 0;
  on_.store(true, std::memory_order_relaxed);
}

// Adds a copy, once streams can wait for its end.
void CopyLog::add(bool is_sent, int peer, const Descriptor& what,
                  int64_t asked_ns, const memory::Mark& end) {
  const LaneCopy copy{.is_sent = is_sent,
                      .peer = peer,
                      .lane = what.lane,
                      .num_bytes = what.num_bytes,
                      .begin_ns = asked_ns};
  end.when_recorded([this, copy, end] { add_recorded(copy, end); });
}

// The end of a copy is an event of the lane, which may have no time (events
// between processes have none). An otherwise idle stream therefore waits for
// the event, and the clock marks a point on that stream.
void CopyLog::add_recorded(const LaneCopy& copy, const memory::Mark& end) {
  Entry entry;
  entry.copy = copy;
  const std::lock_guard lock(mutex_);
  if (!is_on()) return;  // it was just handed over
  if (!end) {
    entry.copy.end_ns = monotonic_ns();
  } else if (device_.is_cpu()) {
    entry.end = end;
  } else {
    const c10::Stream& stream = stream_locked(entry.copy);
    end.block(stream);
    entry.point = clock_ ? clock_->point(stream) : nullptr;
    if (!entry.point) return;  // asked for between two steps
  }
  if (entries_.size() >= capacity_) {
    entries_.pop_front();
    ++num_dropped_;
  }
  entries_.push_back(std::move(entry));
}

const c10::Stream& CopyLog::stream_locked(const LaneCopy& copy) {
  const std::tuple key(copy.is_sent, copy.peer, copy.lane);
  const auto found = streams_.find(key);
  if (found != streams_.end()) return found->second;
  const c10::impl::VirtualGuardImpl impl(device_.type());
  return streams_.emplace(key, impl.getStreamFromGlobalPool(device_))
      .first->second;
}

CopyLog::Recording CopyLog::take() {
  const std::lock_guard lock(mutex_);
  if (clock_) clock_->settle();
  const int64_t last_ns = monotonic_ns() + kLongestWaitNs;
  Recording recording;
  for (Entry& entry : entries_) {
    LaneCopy copy = entry.copy;
    if (entry.point) {
      const memory::DeviceClock::Time time = clock_->time_of(*entry.point);
      copy.end_ns = std::max(copy.begin_ns, time.ns);
      copy.uncertainty_ns = time.uncertainty_ns;
    } else if (entry.end) {
      while (!entry.end.is_over() && monotonic_ns() < last_ns) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      copy.end_ns = entry.end.over_ns();
    }
    if (copy.end_ns > 0) recording.copies.push_back(copy);
  }
  std::stable_sort(recording.copies.begin(), recording.copies.end(),
                   [](const LaneCopy& a, const LaneCopy& b) {
                     return a.begin_ns < b.begin_ns;
                   });
  recording.num_dropped = std::exchange(num_dropped_, 0);
  entries_.clear();
  return recording;
}

void CopyLog::discard() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
  num_dropped_ = 0;
  clock_.reset();
}

}  // namespace smp::lanes
