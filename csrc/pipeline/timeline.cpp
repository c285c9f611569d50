#include "csrc/pipeline/timeline.h"

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/memory/device_scope.h"
#include "csrc/pipeline/wire.h"

namespace smp::pipeline {
namespace {

// Passing the baton on takes less; shorter gaps mean nothing.
constexpr int64_t kShortestIdleNs = 2000;

}  // namespace

void Timeline::set_copies(std::shared_ptr<lanes::CopyLog> copies) {
  std::lock_guard<std::mutex> lock(mutex_);
  copies_ = std::move(copies);
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
  device_since_.reset();
  stream_.reset();
  clock_.reset();
  if (!device_.is_cpu())
    clock_ = std::make_shared<memory::DeviceClock>(device_);
  if (copies_) copies_->start(capacity_, clock_);
  on_.store(true, std::memory_order_relaxed);
}

void Timeline::stop() {
  on_.store(false, std::memory_order_relaxed);
  std::lock_guard<std::mutex> lock(mutex_);
  if (copies_) copies_->stop();
}

Timeline::Recording Timeline::take() {
  Recording recording;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::rotate(ring_.begin(), ring_.begin() + static_cast<int64_t>(oldest_),
                ring_.end());
    oldest_ = 0;
    recording = {std::exchange(ring_, {}), std::exchange(num_dropped_, 0)};
    device_since_.reset();
  }
  read_device(recording);
  add_copies(recording);
  return recording;
}

void Timeline::discard() {
  std::lock_guard<std::mutex> lock(mutex_);
  ring_.clear();
  oldest_ = 0;
  num_dropped_ = 0;
  device_since_.reset();
  clock_.reset();
  if (copies_) copies_->discard();
}

// Reads the times of the device. A stream does one thing after the other, even
// where the offset of a step is wrong.
void Timeline::read_device(Recording& recording) {
  std::shared_ptr<memory::DeviceClock> clock;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    clock = clock_;
  }
  if (!clock) return;
  clock->settle();
  int64_t last_ns = 0;
  for (TimelineEvent& event : recording.events) {
    if (!event.begin) continue;
    const memory::DeviceClock::Time begin = clock->time_of(*event.begin);
    const memory::DeviceClock::Time end = clock->time_of(*event.end);
    event.begin_ns = std::max(begin.ns, last_ns);
    event.end_ns = last_ns = std::max(end.ns, event.begin_ns);
    event.uncertainty_ns = std::max(begin.uncertainty_ns, end.uncertainty_ns);
    event.begin.reset();
    event.end.reset();
  }
}

void Timeline::add_copies(Recording& recording) {
  std::shared_ptr<lanes::CopyLog> log;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    log = copies_;
  }
  if (!log) return;
  const lanes::CopyLog::Recording copies = log->take();
  recording.num_dropped += copies.num_dropped;
  for (const lanes::LaneCopy& copy : copies.copies) {
    TimelineEvent event;
    event.kind = copy.is_sent ? TimelineEvent::Kind::kLaneSent
                              : TimelineEvent::Kind::kLaneReceived;
    event.key.mb = -1;
    event.what = lanes::to_string(copy.lane);
    event.peer = copy.peer;
    event.begin_ns = copy.begin_ns;
    event.end_ns = copy.end_ns;
    event.bytes = copy.num_bytes;
    event.uncertainty_ns = copy.uncertainty_ns;
    recording.events.push_back(std::move(event));
  }
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
  device_since_.reset();
  if (!clock_) return;
  stream_ = memory::current_stream(device_);
  clock_->begin_period(*stream_);
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
  if (clock_ && stream_) device_since_ = clock_->point(*stream_);
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
  end_device_locked();
}

// Records what the task that runs has asked of its step's stream: the work lies
// between two points of that stream.
void Timeline::end_device_locked() {
  if (!clock_ || !device_since_) return;
  TimelineEvent event;
  event.kind = TimelineEvent::Kind::kDevice;
  event.key = running_;
  event.begin = std::exchange(device_since_, nullptr);
  event.end = clock_->point(*stream_);
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
    // Small tensors have no name; their message has a name.
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
