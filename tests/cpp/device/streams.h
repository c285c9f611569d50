#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

// Streams of the late device: one thread each, which runs what was queued, in
// order, after random pauses.

namespace smp::late {

inline constexpr auto kType = c10::DeviceType::PrivateUse1;
inline constexpr int kMostDevices = 64;

/// Returns the number of devices, by SMP_LATE_DEVICES (8).
int num_devices();
c10::Device device(c10::DeviceIndex index);
/// Returns the index of a device, or the calling thread's current one.
c10::DeviceIndex index_of(c10::Device device);

c10::DeviceIndex current_device();
/// Makes a device current in the calling thread. @return the one before
c10::DeviceIndex exchange_device(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
/// Makes a stream current in the calling thread. @return the one before
c10::Stream exchange_stream(const c10::Stream& stream);
/// Returns a stream of one of the device's pools of 32, in turn, as CUDA's do.
/// @param is_high pool of high priority, which makes no other difference
c10::Stream stream_of_pool(c10::DeviceIndex index, bool is_high = false);

/// A point in the work of a stream.
class Mark {
 public:
  void fire();
  bool is_fired() const;
  void wait() const;
  /// Returns when it fired, by the steady clock.
  int64_t fired_ns() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  int64_t fired_ns_ = -1;
};
using MarkPtr = std::shared_ptr<Mark>;

/// Queues work. The first error of any work is kept: later work is skipped, and
/// the host finds the error wherever it queues or waits, as with CUDA.
void enqueue(const c10::Stream& stream, std::function<void()> work);
/// Queues work that is also done after an error, and may be queued then.
void enqueue_always(const c10::Stream& stream, std::function<void()> work);
/// Returns the end of what has been queued.
MarkPtr mark_end(const c10::Stream& stream);
/// Makes later work of the stream wait for a point; null: for nothing.
void wait_for(const c10::Stream& stream, MarkPtr mark);
/// Waits in the host, without the GIL. @throws c10::Error the kept error
void drain(const c10::Stream& stream);
void drain_device(c10::DeviceIndex index);
void drain_mark(const MarkPtr& mark);
bool is_idle(const c10::Stream& stream);

/// Runs work on a stream now: waits for what was queued before, and for itself.
/// @throws what `work` throws
void run_now(const c10::Stream& stream, const std::function<void()>& work);

/// Sets the pauses before work: 0 to `max_us` microseconds, before every fourth
/// piece on average. Streams draw from `seed` and their own numbers.
void set_delays(uint64_t seed, int64_t max_us);
/// Returns the kept error and forgets it; empty if there is none.
std::string take_error();
/// Ends all threads once their work is done. Work queued later runs at once.
void stop();

}  // namespace smp::late
