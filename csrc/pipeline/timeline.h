#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "csrc/common/monotonic_clock.h"
#include "csrc/lanes/copy_log.h"
#include "csrc/mailbox/message.h"
#include "csrc/memory/device_clock.h"
#include "csrc/schedule/task.h"

namespace smp::pipeline {

/// An event on a rank. Members that do not apply keep their defaults.
struct TimelineEvent {
  enum class Kind : int8_t {
    kRun,           ///< a task held the baton
    kWait,          ///< a suspended task lacked what it needs
    kIdle,          ///< no context held the baton
    kSent,          ///< a tensor left this rank
    kReceived,      ///< a tensor arrived
    kStep,          ///< one call of a step function
    kDevice,        ///< a device did what a task had asked of it
    kLaneSent,      ///< a lane brought a tensor from this rank
    kLaneReceived,  ///< the same, to this rank
  };

  Kind kind = Kind::kRun;
  /// Run, wait, device: the task. Idle: the task that ended it; microbatch -1
  /// if none did. Tensors: the microbatch. Lanes: microbatch -1.
  schedule::TaskKey key;
  int64_t step = -1;
  /// Reason of a wait, message that carried a tensor, or name of a lane: a
  /// literal.
  const char* what = "";
  int peer = -1;         ///< global rank at the other end
  int64_t begin_ns = 0;  ///< of Timeline::now_ns
  int64_t end_ns = 0;
  /// Name of a tensor between one sender and one receiver. Step: the number of
  /// microbatches.
  mailbox::Ref ref;
  int64_t bytes = 0;
  /// Largest error of the times of a device, in either direction.
  int64_t uncertainty_ns = 0;
  memory::DeviceClock::PointPtr begin = {};  ///< device: until it is read
  memory::DeviceClock::PointPtr end = {};
};

/// Records what a rank does, and when its device did it. Off by default: then a
/// call costs one relaxed load. Keeps the youngest events. Any thread may call
/// any method.
class Timeline {
 public:
  struct Recording {
    std::vector<TimelineEvent> events;  ///< in the order they became known
    int64_t num_dropped = 0;            ///< older ones
  };

  static int64_t now_ns() { return monotonic_ns(); }

  explicit Timeline(c10::Device device = c10::Device(c10::DeviceType::CPU))
      : device_(device) {}

  /// Sets a log of copies that are recorded too; before `start`.
  /// @param copies  may be null
  void set_copies(std::shared_ptr<lanes::CopyLog> copies);

  /// Begins a recording of at most `capacity` events; between steps.
  /// @throws ValueError for a capacity below 1
  void start(int64_t capacity);
  void stop();
  /// Returns the recording; waits until the device has done it.
  Recording take();
  /// Forgets what was recorded, and waits for nothing.
  void discard();
  bool is_on() const { return on_.load(std::memory_order_relaxed); }

  /// Begins a step. Tasks use the device on the caller's current stream.
  void begin_step(int64_t step, int num_microbatches);
  void end_step();
  /// Notes that a task gets the baton.
  /// @param awaited  what the rank waited for until now
  void begin_run(const schedule::TaskKey& key, const char* awaited,
                 int awaited_rank);
  /// Notes that the task that runs gives the baton back.
  void end_run();
  /// Records that a suspended task has got what it waits for since `since_ns`.
  void record_wait(const schedule::TaskKey& key, int64_t since_ns,
                   const char* awaited, int awaited_rank);
  /// Records the tensors of a pipeline message that have data; `kind` is their
  /// direction.
  void record_tensors(TimelineEvent::Kind kind, int global_rank, int peer,
                      const mailbox::Message& message);

 private:
  void add_locked(TimelineEvent event);
  void end_device_locked();
  void read_device(Recording& recording);
  void add_copies(Recording& recording);
  void end_idle_locked(int64_t now, const schedule::TaskKey& key,
                       const char* awaited, int awaited_rank);

  const c10::Device device_;
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  size_t capacity_ = 0;
  std::vector<TimelineEvent> ring_;
  size_t oldest_ = 0;  // once the ring is full
  int64_t num_dropped_ = 0;
  int64_t step_ = -1;
  int64_t num_microbatches_ = 0;
  int64_t step_since_ns_ = 0;  // 0: outside of a step
  int64_t free_since_ns_ = 0;  // 0: a context holds the baton
  int64_t run_since_ns_ = 0;   // 0: no context holds it
  schedule::TaskKey running_;
  std::shared_ptr<lanes::CopyLog> copies_;
  std::shared_ptr<memory::DeviceClock> clock_;  // while a device is recorded
  std::optional<c10::Stream> stream_;           // of the step
  memory::DeviceClock::PointPtr device_since_;  // beginning of what runs
};

}  // namespace smp::pipeline
