#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "tests/cpp/cuda_runtime/machine.h"

/// A stream and the thread that plays it: its work is done in order and late.
struct CUstream_st {
 public:
  CUstream_st(int device, uint64_t seed, int max_us);
  CUstream_st(const CUstream_st&) = delete;
  CUstream_st& operator=(const CUstream_st&) = delete;

  /// Asks for work that takes a random time; `begin` runs before that time.
  void add_late(std::function<void()> begin, std::function<void()> work);
  void add(std::function<void()> work);
  /// Later work begins once the event was recorded that often.
  void add_wait(std::shared_ptr<smp::fake_cuda::Records> records,
                uint64_t goal);

  uint64_t num_asked();
  bool has_done(uint64_t number);
  /// Waits until the work so far is over. @return false: the device has failed
  bool drain();

  const int device;

 private:
  void run();
  void pause();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> works_;
  uint64_t num_asked_ = 0;
  uint64_t num_done_ = 0;
  std::minstd_rand random_;  // of the thread
  const int max_us_;
  std::thread thread_;  // as long as the process
};

namespace smp::fake_cuda {

/// Stops all streams; those that wait for it go on.
void freeze_streams();
/// Returns whether the calling thread plays a stream.
bool is_stream_thread();

}  // namespace smp::fake_cuda
