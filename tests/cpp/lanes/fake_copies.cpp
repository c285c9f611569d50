#include "tests/cpp/lanes/fake_copies.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/health/thread_name.h"
#include "tests/cpp/lanes/shared_file.h"

namespace smp::lanes {
namespace {

using memory::Mark;

constexpr int kNonsense = 0xff;
constexpr std::chrono::microseconds kLookAgain{20};

// Counts of an event, in memory that processes share.
struct EventWords {
  std::atomic<uint64_t> num_asked;
  std::atomic<uint64_t> num_over;
};

class FakeEvent final : public SharedEvent {
 public:
  explicit FakeEvent(DeviceMemory memory) : memory_(std::move(memory)) {}

  const DeviceMemory& memory() const { return memory_; }
  EventWords& words() const {
    return *reinterpret_cast<EventWords*>(memory_.get());
  }

 private:
  const DeviceMemory memory_;
};

const FakeEvent& fake(const SharedEvent& event) {
  return static_cast<const FakeEvent&>(event);
}

class FakeQueue final : public CopyQueue {
 public:
  FakeQueue(const FakeOptions& options, int global_rank, bool is_incoming,
            std::shared_ptr<health::FaultBoard> faults)
      : is_incoming_(is_incoming),
        faults_(std::move(faults)),
        times_(options, 2 * global_rank + (is_incoming ? 1 : 0)),
        thread_([this] { run_all(); }) {}
  ~FakeQueue() override { stop(); }

  void follow_caller() override {}  // work of the CPU is done
  void wait(const SharedEvent& event) override {
    const DeviceMemory memory = fake(event).memory();
    EventWords& words = fake(event).words();
    ask([this, memory, &words, goal = words.num_asked.load()] {
      while (words.num_over.load() < goal && !is_stopping_) {
        std::this_thread::sleep_for(kLookAgain);
      }
    });
  }
  void copy(uint8_t* to, const uint8_t* from, int64_t num_bytes) override {
    ask([this, to, from, size = static_cast<size_t>(num_bytes)] {
      const auto delay = times_.next();
      if (!delay) {
        while (!is_stopping_) std::this_thread::sleep_for(kLookAgain);
        return;
      }
      std::this_thread::sleep_for(*delay);
      if (size > 0) std::memcpy(to, from, size);
      // The source is not read again.
      if (is_incoming_)
        std::memset(const_cast<uint8_t*>(from), kNonsense, size);
    });
  }
  void record(SharedEvent& event) override {
    const DeviceMemory memory = fake(event).memory();
    EventWords& words = fake(event).words();
    ask([memory, &words, number = ++words.num_asked] {
      words.num_over.store(number);
    });
  }
  at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType dtype) override {
    at::Tensor tensor = at::empty(sizes, dtype);
    fill_with_nonsense(tensor);
    return tensor;
  }
  void keep(const at::Tensor& tensor) override {
    ask([tensor] {});
  }
  Mark end() override {
    const auto event = std::make_shared<LateEvent>(faults_);
    ask([event] { event->end(); }, event);
    return Mark(event);
  }

  void stop() {
    is_stopping_ = true;
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    for (const Work& work : works_) {
      if (work.end) work.end->drop();
    }
    works_.clear();
  }

 private:
  struct Work {
    std::function<void()> run;
    std::shared_ptr<LateEvent> end;
  };

  void ask(std::function<void()> run,
           std::shared_ptr<LateEvent> end = nullptr) {
    {
      std::lock_guard lock(mutex_);
      works_.push_back({std::move(run), std::move(end)});
    }
    changed_.notify_one();
  }

  void run_all() {
    health::name_this_thread(is_incoming_ ? "smp-fake-in" : "smp-fake-out");
    std::unique_lock lock(mutex_);
    while (true) {
      // `stop` notifies without the lock, so the wait needs a limit.
      changed_.wait_for(lock, std::chrono::milliseconds(20),
                        [this] { return is_stopping_ || !works_.empty(); });
      if (is_stopping_) return;
      if (works_.empty()) continue;
      const Work& work = works_.front();  // stays where it is
      lock.unlock();
      work.run();
      lock.lock();
      // Work that was cut short is not over: `stop` drops its end.
      if (is_stopping_) return;
      works_.pop_front();
    }
  }

  const bool is_incoming_;
  const std::shared_ptr<health::FaultBoard> faults_;
  CopyTimes times_;  // of the thread
  std::atomic<bool> is_stopping_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> works_;
  std::thread thread_;
};

class FakeCopies final : public DeviceCopies {
 public:
  FakeCopies(const FakeOptions& options, int global_rank,
             const std::shared_ptr<health::FaultBoard>& faults)
      : outgoing_(options, global_rank, false, faults),
        incoming_(options, global_rank, true, faults) {}

  std::string device_name() const override { return "cpu"; }
  std::vector<std::string> reachable() const override { return {"cpu"}; }

  DeviceMemory allocate(int64_t num_bytes) override {
    DeviceMemory memory = make_file(num_bytes);
    std::memset(memory.get(), kNonsense, static_cast<size_t>(num_bytes));
    return memory;
  }
  std::string handle_of(const DeviceMemory& memory) override {
    return files_.at(memory.get()).handle();
  }
  DeviceMemory open_memory(const std::string& handle) override {
    return SharedFile::open(handle);
  }
  SharedEventPtr new_event() override {
    return std::make_shared<FakeEvent>(make_file(sizeof(EventWords)));
  }
  std::string handle_of(const SharedEvent& event) override {
    return handle_of(fake(event).memory());
  }
  SharedEventPtr open_event(const std::string& handle) override {
    return std::make_shared<FakeEvent>(open_memory(handle));
  }

  void put(uint8_t* to, const std::string& bytes) override {
    std::memcpy(to, bytes.data(), bytes.size());
  }
  std::string get(const uint8_t* from, int64_t num_bytes) override {
    return {reinterpret_cast<const char*>(from),
            static_cast<size_t>(num_bytes)};
  }

  CopyQueue& outgoing() override { return outgoing_; }
  CopyQueue& incoming() override { return incoming_; }
  void stop() override {
    outgoing_.stop();
    incoming_.stop();
  }

 private:
  // Makes memory of zeros, which is the state of an event never recorded.
  DeviceMemory make_file(int64_t num_bytes) {
    SharedFile file(num_bytes);
    DeviceMemory memory = file.memory();
    files_.emplace(memory.get(), std::move(file));
    return memory;
  }

  std::map<const uint8_t*, SharedFile> files_;
  FakeQueue outgoing_;
  FakeQueue incoming_;
};

}  // namespace

std::unique_ptr<DeviceCopies> make_fake_copies(
    const FakeOptions& options, int global_rank,
    std::shared_ptr<health::FaultBoard> faults) {
  return std::make_unique<FakeCopies>(options, global_rank, faults);
}

}  // namespace smp::lanes
