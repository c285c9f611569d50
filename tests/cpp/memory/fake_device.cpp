#include "tests/cpp/memory/fake_device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "tests/cpp/memory/fake_device_streams.h"

namespace smp::fake_device {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kNumDevices> streams_of_thread{};

std::mutex mutex;  // guards what follows
std::vector<Use> all_uses;
// Kept as long as the process: tensors of other static objects may be freed
// after those of this source, and LeakSanitizer looks for blocks at the end.
auto& blocks = *new std::map<void*, std::pair<int, size_t>>;  // device, size
auto& free_blocks = *new std::map<std::pair<int, size_t>, std::vector<void*>>;
std::set<c10::StreamId> of_pool;
int64_t in_use = 0;
int64_t peak = 0;

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : device_of_thread;
}

c10::Stream stream_of_thread(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, device(index),
                     streams_of_thread.at(index));
}

// ------------------------------------------------------------------- memory

void free_block(void* begin) {
  const std::lock_guard lock(mutex);
  const auto& block = blocks.at(begin);
  in_use -= static_cast<int64_t>(block.second);
  free_blocks[block].push_back(begin);
}

// The current device is what counts, as with CUDA.
class CachingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    note("allocate");
    if (num_bytes == 0) return {nullptr, device(device_of_thread)};
    const std::lock_guard lock(mutex);
    auto& free = free_blocks[{device_of_thread, num_bytes}];
    void* begin = nullptr;
    if (free.empty()) {
      begin = std::malloc(num_bytes);
      blocks[begin] = {device_of_thread, num_bytes};
    } else {
      begin = free.back();
      free.pop_back();
    }
    in_use += static_cast<int64_t>(num_bytes);
    peak = std::max(peak, in_use);
    return {begin, begin, &free_block, device(device_of_thread)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
};

CachingAllocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

// -------------------------------------------------------------- what c10 asks

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device(std::exchange(device_of_thread, index_of(to)));
  }
  c10::Device getDevice() const override { return device(device_of_thread); }
  void setDevice(c10::Device to) const override {
    device_of_thread = index_of(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    device_of_thread = index_of(to);
  }
  c10::Stream getStream(c10::Device of) const noexcept override {
    return stream_of_thread(index_of(of));
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, device(index_of(of)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    const c10::Stream stream = new_stream(index_of(of));
    const std::lock_guard lock(mutex);
    of_pool.insert(stream.id());
    return stream;
  }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    auto& current = streams_of_thread.at(to.device_index());
    return c10::Stream(c10::Stream::UNSAFE, to.device(),
                       std::exchange(current, to.id()));
  }
  // Not of all releases of torch.
  virtual void* getStreamNativeHandle(const c10::Stream stream) const {
    return handle_of(stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    note(kUseOfEvent, stream.device_index());
    record_event(event, stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    note(kUseOfEvent, stream.device_index());
    wait_for_event(event, stream);
  }
  bool queryEvent(void* event) const override { return is_fired(event); }
  double elapsedTime(void* from, void* to,
                     const c10::DeviceIndex) const override {
    return static_cast<double>(fired_ns(to) - fired_ns(from)) / 1e6;
  }
  void destroyEvent(void* event,
                    const c10::DeviceIndex index) const noexcept override {
    note(kUseOfEvent, index);
    drop_event(event);
  }
  void synchronizeEvent(void*) const override { run_all(); }
  bool queryStream(const c10::Stream& stream) const override {
    return is_empty(stream);
  }
  void synchronizeStream(const c10::Stream&) const override { run_all(); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    note("synchronize", index);
    run_all();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  // Not of all releases of torch.
  virtual bool isBuilt() const { return true; }
  virtual bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::DeviceType::CPU);
  }
  const at::Generator& getDefaultGenerator(
      c10::DeviceIndex index) const override {
    static const std::array<at::Generator, kNumDevices> generators = {
        new_generator(), new_generator(), new_generator(), new_generator()};
    return generators.at(index);
  }
};

const bool is_registered = [] {
  c10::register_privateuse1_backend("fake");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

c10::Device device(int index) {
  return {kType, static_cast<c10::DeviceIndex>(index)};
}

c10::Stream new_stream(int device_index) {
  static std::atomic<c10::StreamId> last_id{0};
  return c10::Stream(c10::Stream::UNSAFE, device(device_index), ++last_id);
}

bool is_from_pool(int64_t stream_id) {
  const std::lock_guard lock(mutex);
  return of_pool.count(stream_id) > 0;
}

void* handle_of(const c10::Stream& stream) {
  return reinterpret_cast<void*>(stream.hash());
}

c10::Stream current_stream_of(c10::Device of) {
  return stream_of_thread(index_of(of));
}

void note(const std::string& what, int home) {
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  const std::lock_guard lock(mutex);
  all_uses.push_back({what, name.data(), device_of_thread,
                      streams_of_thread.at(device_of_thread), home});
}

std::vector<Use> uses() {
  const std::lock_guard lock(mutex);
  return all_uses;
}

void reset() {
  run_all();
  set_lazy(false);
  set_clock({});
  const std::lock_guard lock(mutex);
  all_uses.clear();
  peak = in_use;
}

int64_t bytes_in_use() {
  const std::lock_guard lock(mutex);
  return in_use;
}

int64_t peak_bytes() {
  const std::lock_guard lock(mutex);
  return peak;
}

void launch(std::function<void()> kernel) {
  ask(stream_of_thread(device_of_thread), std::move(kernel));
}

}  // namespace smp::fake_device
