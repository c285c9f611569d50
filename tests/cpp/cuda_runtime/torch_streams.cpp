#include <array>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/cpp/cuda_runtime/torch_device.h"
#include "tests/cpp/cuda_runtime/torch_state.h"

// Devices and streams of threads, as c10/cuda has them.

namespace smp::fake_cuda {
namespace {

constexpr int kMaxDevices = 8;
constexpr size_t kPoolSize = 32;  // as PyTorch's

thread_local c10::DeviceIndex target_device = -1;
thread_local std::array<c10::StreamId, kMaxDevices> current_streams{};

struct Pool {
  std::vector<cudaStream_t> streams;  // their ids begin at 1
  size_t next = 0;
};

std::mutex pools_mutex;
auto& pools = *new std::array<Pool, kMaxDevices>;

c10::DeviceIndex real_device() {
  int device = 0;
  check(cudaGetDevice(&device));
  return static_cast<c10::DeviceIndex>(device);
}

c10::Stream stream_with(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, torch_device(device), id);
}

}  // namespace

c10::Device torch_device(int index) {
  return {kTorchType, static_cast<c10::DeviceIndex>(index)};
}

c10::DeviceIndex torch_get_device() {
  return target_device >= 0 ? target_device : real_device();
}

void torch_set_device(c10::DeviceIndex device) {
  target_device = -1;
  if (real_device() != device) check(cudaSetDevice(device));
}

c10::DeviceIndex torch_exchange_device(c10::DeviceIndex device) {
  const c10::DeviceIndex before = std::exchange(target_device, -1);
  const c10::DeviceIndex current = before >= 0 ? before : real_device();
  if (before >= 0 || current != device) check(cudaSetDevice(device));
  return current;
}

void torch_maybe_set_device(c10::DeviceIndex device) {
  if (contexts().count(device) > 0) {
    torch_set_device(device);
  } else {
    target_device = device;
  }
}

cudaStream_t native_of(const c10::Stream& stream) {
  if (stream.id() == 0) return nullptr;
  const std::lock_guard lock(pools_mutex);
  return pools.at(stream.device_index()).streams.at(stream.id() - 1);
}

c10::Stream torch_current_stream(c10::DeviceIndex device) {
  return stream_with(device, current_streams.at(device));
}

c10::Stream torch_new_stream(c10::DeviceIndex device) {
  const c10::DeviceIndex before = torch_exchange_device(device);
  const std::lock_guard lock(pools_mutex);
  Pool& pool = pools.at(device);
  if (pool.streams.size() < kPoolSize) {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    pool.streams.push_back(stream);
  }
  torch_maybe_set_device(before);
  const size_t index = pool.next++ % kPoolSize;
  return stream_with(device, static_cast<c10::StreamId>(index) + 1);
}

c10::Stream torch_exchange_stream(const c10::Stream& stream) {
  auto& current = current_streams.at(stream.device_index());
  return stream_with(stream.device_index(),
                     std::exchange(current, stream.id()));
}

}  // namespace smp::fake_cuda
