#include "tests/cpp/device/streams.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <exception>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace smp::late {
namespace {

constexpr int kStreamsOfPool = 32;

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kMostDevices> streams_of_thread{};

std::mutex error_mutex;
std::string& kept_error = *new std::string;  // guarded
std::atomic<bool> has_error = false;

// Factor of the pauses of some streams: a stream that is late as a
// whole shows a wait that is missing far behind the work it is for.
constexpr int64_t kSlowness = 20;
std::atomic<uint64_t> delay_seed{1};
std::atomic<int64_t> most_delay_us{0};
std::atomic<bool> is_stopped{false};

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

void keep_error(const std::string& text) {
  const std::lock_guard lock(error_mutex);
  if (kept_error.empty()) kept_error = text.empty() ? "unknown" : text;
  has_error = true;
}

void check_error() {
  if (!has_error) return;
  const std::lock_guard lock(error_mutex);
  TORCH_CHECK(false,
              "late device: work that was queued earlier failed: ", kept_error);
}

// Lets other threads of Python run while this one waits for a stream, whose
// work may be a Python function.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

struct Task {
  std::function<void()> work;
  bool is_always = false;
};

void run_task(const Task& task) noexcept {
  if (has_error && !task.is_always) return;
  try {
    task.work();
  } catch (const c10::Error& error) {
    keep_error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    keep_error(error.what());
  }
}

// The thread of one stream.
class Executor {
 public:
  explicit Executor(const c10::Stream& stream)
      : stream_(stream), thread_([this] { run(); }) {}

  void add(Task task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  bool is_idle() const {
    const std::lock_guard lock(mutex_);
    return tasks_.empty() && !is_running_;
  }

  void wait_until_idle() {
    const auto mark = std::make_shared<Mark>();
    add({[mark] { mark->fire(); }, true});
    mark->wait();
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

 private:
  void run() {
    const auto name = "late" + std::to_string(stream_.device_index()) + "." +
                      std::to_string(stream_.id());
    pthread_setname_np(pthread_self(), name.c_str());
    exchange_device(stream_.device_index());
    exchange_stream(stream_);
    while (const std::optional<Task> task = next()) {
      pause();
      run_task(*task);
    }
  }

  // Waits for a task; nothing when the stream ends.
  std::optional<Task> next() {
    std::unique_lock lock(mutex_);
    is_running_ = false;
    changed_.wait(lock, [&] { return !tasks_.empty() || is_ending_; });
    if (tasks_.empty()) return std::nullopt;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    is_running_ = true;
    return task;
  }

  void pause() {
    const int64_t most_us = most_delay_us;
    if (most_us == 0) return;
    if (const uint64_t seed = delay_seed; seed != seed_) {
      seed_ = seed;
      random_.seed(seed * 1000003 + stream_.hash());
      const bool is_slow = stream_.id() != 0 && random_() % 3 == 0;
      slowness_ = is_slow ? kSlowness : 1;
    }
    if (random_() % 4 != 0) return;
    const auto us = static_cast<int64_t>(random_() % (slowness_ * most_us + 1));
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

  const c10::Stream stream_;
  uint64_t seed_ = 0;
  int64_t slowness_ = 1;
  std::mt19937_64 random_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_running_ = false;
  bool is_ending_ = false;
  std::thread thread_;  // the last member: it uses the others
};

// Kept as long as the process, because tensors of static objects are freed
// late.
std::mutex executors_mutex;
auto& executors = *new std::map<uint64_t, std::unique_ptr<Executor>>;

Executor& executor_of(const c10::Stream& stream) {
  const std::lock_guard lock(executors_mutex);
  auto& executor = executors[stream.hash()];
  if (executor == nullptr) executor = std::make_unique<Executor>(stream);
  return *executor;
}

void add(const c10::Stream& stream, Task task) {
  if (is_stopped) return run_task(task);
  executor_of(stream).add(std::move(task));
}

std::vector<c10::Stream> streams_of(c10::DeviceIndex index) {
  std::vector<c10::Stream> streams;
  for (c10::StreamId id = 0; id <= 2 * kStreamsOfPool; ++id) {
    const c10::Stream stream(c10::Stream::UNSAFE, device(index), id);
    const std::lock_guard lock(executors_mutex);
    if (executors.count(stream.hash()) > 0) streams.push_back(stream);
  }
  return streams;
}

}  // namespace

int num_devices() {
  static const int number = [] {
    const char* text = std::getenv("SMP_LATE_DEVICES");
    const int value = text == nullptr ? 8 : std::atoi(text);
    TORCH_CHECK(value >= 1 && value <= kMostDevices,
                "SMP_LATE_DEVICES must be 1 to ", kMostDevices, "; got ", text);
    return value;
  }();
  return number;
}

c10::Device device(c10::DeviceIndex index) { return {kType, index}; }

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : device_of_thread;
}

c10::DeviceIndex current_device() { return device_of_thread; }

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < num_devices(), "late device: no device ",
              static_cast<int>(index), " of ", num_devices());
  return std::exchange(device_of_thread, index);
}

c10::Stream current_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, device(index),
                     streams_of_thread.at(index));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  auto& current = streams_of_thread.at(stream.device_index());
  return c10::Stream(c10::Stream::UNSAFE, stream.device(),
                     std::exchange(current, stream.id()));
}

c10::Stream stream_of_pool(c10::DeviceIndex index, bool is_high) {
  using Last = std::array<std::atomic<c10::StreamId>, kMostDevices>;
  static std::array<Last, 2> last{};
  const c10::StreamId turn = last.at(is_high).at(index)++ % kStreamsOfPool;
  const c10::StreamId id = 1 + turn + (is_high ? kStreamsOfPool : 0);
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}

// -------------------------------------------------------------------- marks

void Mark::fire() {
  const std::lock_guard lock(mutex_);
  fired_ns_ = now_ns();
  changed_.notify_all();
}

bool Mark::is_fired() const { return fired_ns() >= 0; }

void Mark::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return fired_ns_ >= 0; });
}

int64_t Mark::fired_ns() const {
  const std::lock_guard lock(mutex_);
  return fired_ns_;
}

// --------------------------------------------------------------------- work

void enqueue(const c10::Stream& stream, std::function<void()> work) {
  check_error();
  add(stream, {std::move(work), false});
}

void enqueue_always(const c10::Stream& stream, std::function<void()> work) {
  add(stream, {std::move(work), true});
}

MarkPtr mark_end(const c10::Stream& stream) {
  auto mark = std::make_shared<Mark>();
  enqueue_always(stream, [mark] { mark->fire(); });
  return mark;
}

void wait_for(const c10::Stream& stream, MarkPtr mark) {
  if (mark == nullptr) return;
  enqueue_always(stream, [mark = std::move(mark)] { mark->wait(); });
}

void drain(const c10::Stream& stream) { drain_mark(mark_end(stream)); }

void drain_mark(const MarkPtr& mark) {
  if (mark != nullptr && !mark->is_fired()) {
    const WithoutGil no_gil;
    mark->wait();
  }
  check_error();
}

void drain_device(c10::DeviceIndex index) {
  for (const c10::Stream& stream : streams_of(index)) drain(stream);
  check_error();
}

bool is_idle(const c10::Stream& stream) {
  return is_stopped || executor_of(stream).is_idle();
}

void run_now(const c10::Stream& stream, const std::function<void()>& work) {
  std::exception_ptr error;
  enqueue(stream, [&] {
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
  });
  drain(stream);
  if (error) std::rethrow_exception(error);
}

void set_delays(uint64_t seed, int64_t max_us) {
  TORCH_CHECK_VALUE(max_us >= 0, "max_us must not be negative; got ", max_us);
  delay_seed = seed;
  most_delay_us = max_us;
}

std::string take_error() {
  const std::lock_guard lock(error_mutex);
  has_error = false;
  return std::exchange(kept_error, {});
}

void stop() {
  const WithoutGil no_gil;
  std::vector<Executor*> all;
  {
    const std::lock_guard lock(executors_mutex);
    for (auto& [hash, executor] : executors) all.push_back(executor.get());
  }
  // Work of one stream may queue work on another one.
  for (int round = 0; round < 2; ++round) {
    for (Executor* executor : all) executor->wait_until_idle();
  }
  is_stopped = true;
  for (Executor* executor : all) executor->stop();
}

}  // namespace smp::late
