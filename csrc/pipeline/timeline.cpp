#include "csrc/pipeline/timeline.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/pipeline/wire.h"

namespace smp::pipeline {
namespace {

// The baton changes hands in less; such gaps say nothing.
constexpr int64_t kShortestIdleNs = 2000;

}  // namespace

int64_t Timeline::now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Timeline::start(int64_t capacity) {
  SMP_CHECK_VALUE(capacity > 0, "a recording needs room for 1 event or more, ",
                  "got ", capacity);
  std::lock_guard<std::mutex> lock(mutex_);
  capacity_ = static_cast<size_t>(capacity);
  ring_.clear();
  oldest_ = 0;
  num_dropped_ = 0;
  step_since_ns_ = free_since_ns_ = run_since_ns_ = 0;
  on_.store(true, std::memory_order_relaxed);
}

Timeline::Recording Timeline::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::rotate(ring_.begin(), ring_.begin() + static_cast<int64_t>(oldest_),
              ring_.end());
  oldest_ = 0;
  return {std::exchange(ring_, {}), std::exchange(num_dropped_, 0)};
}

void Timeline::add_locked(TimelineEvent event) {
  event.step = event.step < 0 ? step_ : event.step;
  if (ring_.size() < capacity_) {
    ring_.push_back(std::move(event));
    return;
  }
  ring_[oldest_] = std::move(event);
  oldest_ = (oldest_ + 1) % capacity_;
  ++num_dropped_;
}

void Timeline::begin_step(int64_t step, int num_microbatches) {
  if (!is_on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  step_ = step;
  num_microbatches_ = num_microbatches;
  step_since_ns_ = free_since_ns_ = now_ns();
  run_since_ns_ = 0;
}

void Timeline::end_step() {
  if (!is_on()) return;
  const int64_t now = now_ns();
  std::lock_guard<std::mutex> lock(mutex_);
  if (step_since_ns_ == 0) return;  // it began before the recording
  schedule::TaskKey none;
  none.mb = -1;
  end_idle_locked(now, none, "the end of the step on the other ranks", -1);
  TimelineEvent event;
  event.kind = TimelineEvent::Kind::kStep;
  event.begin_ns = std::exchange(step_since_ns_, 0);
  event.end_ns = now;
  event.ref.id = num_microbatches_;
  add_locked(std::move(event));
}

void Timeline::end_idle_locked(int64_t now, const schedule::TaskKey& key,
                               const char* awaited, int awaited_rank) {
  const int64_t since = std::exchange(free_since_ns_, 0);
  if (since == 0 || now - since < kShortestIdleNs) return;
  TimelineEvent event;
  event.kind = TimelineEvent::Kind::kIdle;
  event.key = key;
  event.what = awaited;
  event.peer = awaited_rank;
  event.begin_ns = since;
  event.end_ns = now;
  add_locked(std::move(event));
}

void Timeline::begin_run(const schedule::TaskKey& key, const char* awaited,
                         int awaited_rank) {
  if (!is_on()) return;
  const int64_t now = now_ns();
  std::lock_guard<std::mutex> lock(mutex_);
  end_idle_locked(now, key, awaited, awaited_rank);
  running_ = key;
  run_since_ns_ = now;
}

void Timeline::end_run() {
  if (!is_on()) return;
  const int64_t now = now_ns();
  std::lock_guard<std::mutex> lock(mutex_);
  free_since_ns_ = now;
  const int64_t since = std::exchange(run_since_ns_, 0);
  if (since == 0) return;  // it began before the recording
  TimelineEvent event;
  event.kind = TimelineEvent::Kind::kRun;
  event.key = running_;
  event.begin_ns = since;
  event.end_ns = now;
  add_locked(std::move(event));
}

void Timeline::record_wait(const schedule::TaskKey& key, int64_t since_ns,
                           const char* awaited, int awaited_rank) {
  if (!is_on() || since_ns == 0) return;
  TimelineEvent event;
  event.kind = TimelineEvent::Kind::kWait;
  event.key = key;
  event.what = awaited;
  event.peer = awaited_rank;
  event.begin_ns = since_ns;
  event.end_ns = now_ns();
  std::lock_guard<std::mutex> lock(mutex_);
  add_locked(std::move(event));
}

void Timeline::record_tensors(TimelineEvent::Kind kind, int global_rank,
                              int peer, const mailbox::Message& message) {
  if (!is_on() || peer == global_rank) return;
  const int64_t now = now_ns();
  const Header header = Header::read_from(message);
  const int sender = kind == TimelineEvent::Kind::kSent ? global_rank : peer;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const mailbox::MessageTensor& tensor : message.tensors) {
    if (!tensor.data.defined()) continue;
    TimelineEvent event;
    event.kind = kind;
    event.step = header.step;
    event.key.mb = header.mb;
    event.key.module_id = header.module_id;
    event.what = to_string(header.kind);
    event.peer = peer;
    event.begin_ns = event.end_ns = now;
    // Small tensors have no name; their message has.
    event.ref =
        tensor.ref.id >= 0
            ? tensor.ref
            : mailbox::Ref{sender, header.request_id != 0 ? header.request_id
                                                          : header.index};
    event.bytes = static_cast<int64_t>(tensor.data.nbytes());
    add_locked(std::move(event));
  }
}

}  // namespace smp::pipeline
