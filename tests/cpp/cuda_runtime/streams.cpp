#include "tests/cpp/cuda_runtime/streams.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <utility>

namespace {

constexpr std::chrono::microseconds kLookEvery{30};

std::atomic<bool> is_frozen_now{false};
thread_local bool plays_a_stream = false;

// Blocks a stream for good, as a device does that has failed.
void stop_if_frozen() {
  while (is_frozen_now) std::this_thread::sleep_for(std::chrono::seconds(1));
}

}  // namespace

CUstream_st::CUstream_st(int the_device, uint64_t seed, int max_us)
    : device(the_device),
      random_(static_cast<uint32_t>(seed * 7919 + 1)),
      max_us_(max_us),
      thread_([this] { run(); }) {
  thread_.detach();
}

void CUstream_st::add(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    works_.push_back(std::move(work));
    ++num_asked_;
  }
  changed_.notify_all();
}

void CUstream_st::add_late(std::function<void()> begin,
                           std::function<void()> work) {
  add([this, begin = std::move(begin), work = std::move(work)] {
    begin();
    pause();
    stop_if_frozen();
    work();
  });
}

void CUstream_st::add_wait(std::shared_ptr<smp::fake_cuda::Records> records,
                           uint64_t goal) {
  add([records = std::move(records), goal] {
    while (records->num_over < goal) {
      stop_if_frozen();
      std::this_thread::sleep_for(kLookEvery);
    }
  });
}

// Most pauses are short, so that those which are not let others overtake.
void CUstream_st::pause() {
  if (max_us_ == 0) return;
  const int most = random_() % 4 == 0 ? max_us_ : max_us_ / 8 + 1;
  std::this_thread::sleep_for(
      std::chrono::microseconds(random_() % static_cast<unsigned>(most)));
}

void CUstream_st::run() {
  ::pthread_setname_np(::pthread_self(), "fake-cuda");
  plays_a_stream = true;
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !works_.empty(); });
    const std::function<void()> work = std::move(works_.front());
    works_.pop_front();
    lock.unlock();
    work();
    lock.lock();
    ++num_done_;
    lock.unlock();
    changed_.notify_all();
  }
}

uint64_t CUstream_st::num_asked() {
  const std::lock_guard lock(mutex_);
  return num_asked_;
}

bool CUstream_st::has_done(uint64_t number) {
  const std::lock_guard lock(mutex_);
  return num_done_ >= number;
}

bool CUstream_st::drain() {
  std::unique_lock lock(mutex_);
  const uint64_t goal = num_asked_;
  while (num_done_ < goal) {
    if (is_frozen_now) return false;
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  }
  return true;
}

namespace smp::fake_cuda {

void freeze_streams() { is_frozen_now = true; }
bool is_frozen() { return is_frozen_now; }
bool is_stream_thread() { return plays_a_stream; }

}  // namespace smp::fake_cuda
