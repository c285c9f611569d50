// Compiled with the CUDA toolkit only; has never run on a device.

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/without_throwing.h"
#include "csrc/lanes/device_copies.h"
#include "csrc/memory/device_scope.h"
#include "csrc/memory/kernel_stream.h"

namespace smp::lanes {
namespace {

// Clears an error, so that a later call does not find it. Destructors ignore
// it.
bool clear_error(cudaError_t status) {
  if (status != cudaSuccess) (void)cudaGetLastError();
  return status != cudaSuccess;
}

void check_cuda(cudaError_t status, const char* what) {
  if (!clear_error(status)) return;
  SMP_CHECK(false, what, " of CUDA failed: ", cudaGetErrorString(status));
}

template <typename Handle>
std::string bytes_of(const Handle& handle) {
  static_assert(std::is_trivially_copyable_v<Handle>);
  return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

template <typename Handle>
Handle handle_from(const std::string& bytes) {
  Handle handle;
  SMP_CHECK(bytes.size() == sizeof(handle), "a handle of CUDA has ",
            sizeof(handle), " bytes, got ", bytes.size(),
            "; ranks that run different versions of smp cannot work together");
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  return handle;
}

class CudaEvent final : public SharedEvent {
 public:
  CudaEvent() {
    check_cuda(cudaEventCreateWithFlags(
                   &event_, cudaEventInterprocess | cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
  }
  explicit CudaEvent(const cudaIpcEventHandle_t& handle) {
    check_cuda(cudaIpcOpenEventHandle(&event_, handle),
               "cudaIpcOpenEventHandle");
  }
  ~CudaEvent() override { clear_error(cudaEventDestroy(event_)); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

cudaEvent_t native(const SharedEvent& event) {
  return static_cast<const CudaEvent&>(event).get();
}

// Memory that other processes may map. It lives as long as the process: freeing
// it before all of them have unmapped it is undefined. The next lane of the
// same size reuses it.
class ExportedMemory {
 public:
  static uint8_t* take(int device, int64_t num_bytes) {
    std::lock_guard lock(mutex());
    auto& free = free_memory();
    if (const auto found = free.find({device, num_bytes});
        found != free.end()) {
      uint8_t* const memory = found->second;
      free.erase(found);
      return memory;
    }
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, static_cast<size_t>(num_bytes)),
               "cudaMalloc");
    return static_cast<uint8_t*>(memory);
  }
  static void give_back(int device, int64_t num_bytes, uint8_t* memory) {
    std::lock_guard lock(mutex());
    free_memory().emplace(std::pair{device, num_bytes}, memory);
  }

 private:
  using FreeMemory = std::multimap<std::pair<int, int64_t>, uint8_t*>;

  static std::mutex& mutex() {
    static auto* const the_mutex = new std::mutex;
    return *the_mutex;
  }
  static FreeMemory& free_memory() {
    static auto* const the_memory = new FreeMemory;  // outlives all lanes
    return *the_memory;
  }
};

class CudaQueue final : public CopyQueue {
 public:
  explicit CudaQueue(c10::Device device)
      : impl_(device.type()),
        stream_(impl_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
        native_(
            static_cast<cudaStream_t>(memory::native_stream(stream_).handle)) {}

  void follow_caller() override {
    memory::Mark::record(*memory::current_stream(stream_.device()))
        .block(stream_);
  }
  void wait(const SharedEvent& event) override {
    const c10::StreamGuard guard(stream_);
    check_cuda(cudaStreamWaitEvent(native_, native(event), 0),
               "cudaStreamWaitEvent");
  }
  void copy(uint8_t* to, const uint8_t* from, int64_t num_bytes) override {
    const c10::StreamGuard guard(stream_);
    check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes),
                               cudaMemcpyDefault, native_),
               "cudaMemcpyAsync");
  }
  void record(SharedEvent& event) override {
    const c10::StreamGuard guard(stream_);
    check_cuda(cudaEventRecord(native(event), native_), "cudaEventRecord");
  }
  at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType dtype) override {
    const c10::StreamGuard guard(stream_);
    return at::empty(sizes, at::TensorOptions(dtype).device(stream_.device()));
  }
  void keep(const at::Tensor& tensor) override {
    impl_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
  }
  memory::Mark end() override { return memory::Mark::record(stream_); }

 private:
  const c10::impl::VirtualGuardImpl impl_;
  const c10::Stream stream_;
  const cudaStream_t native_;
};

class CudaCopies final : public DeviceCopies {
 public:
  explicit CudaCopies(c10::Device device)
      : device_(device), outgoing_(device), incoming_(device) {}

  std::string device_name() const override { return name_of(device_.index()); }

  std::vector<std::string> reachable() const override {
    std::vector<std::string> names{device_name()};
    int count = 0;
    check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    for (int other = 0; other < count; ++other) {
      int can = 0;
      if (other == device_.index()) continue;
      check_cuda(cudaDeviceCanAccessPeer(&can, device_.index(), other),
                 "cudaDeviceCanAccessPeer");
      if (can != 0) names.push_back(name_of(other));
    }
    return names;
  }

  DeviceMemory allocate(int64_t num_bytes) override {
    const c10::DeviceGuard guard(device_);
    const int device = device_.index();
    return {ExportedMemory::take(device, num_bytes),
            [device, num_bytes](uint8_t* memory) {
              ExportedMemory::give_back(device, num_bytes, memory);
            }};
  }
  std::string handle_of(const DeviceMemory& memory) override {
    const c10::DeviceGuard guard(device_);
    cudaIpcMemHandle_t handle;
    check_cuda(cudaIpcGetMemHandle(&handle, memory.get()),
               "cudaIpcGetMemHandle");
    return bytes_of(handle);
  }
  DeviceMemory open_memory(const std::string& handle) override {
    const c10::DeviceGuard guard(device_);
    void* memory = nullptr;
    check_cuda(
        cudaIpcOpenMemHandle(&memory, handle_from<cudaIpcMemHandle_t>(handle),
                             cudaIpcMemLazyEnablePeerAccess),
        "cudaIpcOpenMemHandle");
    return {static_cast<uint8_t*>(memory), [device = device_](uint8_t* opened) {
              without_throwing("closing memory of another rank", [&] {
                const c10::DeviceGuard guard(device);
                clear_error(cudaIpcCloseMemHandle(opened));
              });
            }};
  }
  SharedEventPtr new_event() override {
    const c10::DeviceGuard guard(device_);
    return std::make_shared<CudaEvent>();
  }
  std::string handle_of(const SharedEvent& event) override {
    const c10::DeviceGuard guard(device_);
    cudaIpcEventHandle_t handle;
    check_cuda(cudaIpcGetEventHandle(&handle, native(event)),
               "cudaIpcGetEventHandle");
    return bytes_of(handle);
  }
  SharedEventPtr open_event(const std::string& handle) override {
    const c10::DeviceGuard guard(device_);
    return std::make_shared<CudaEvent>(
        handle_from<cudaIpcEventHandle_t>(handle));
  }

  void put(uint8_t* to, const std::string& bytes) override {
    const c10::DeviceGuard guard(device_);
    check_cuda(
        cudaMemcpy(to, bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
        "cudaMemcpy");
    // A copy of pageable memory may return before the device has it.
    check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }
  // Copies to this device first, because memory that the host can read may be
  // unreadable from here. The copies are work of the default stream, and so is
  // the tensor, whose memory another stream might still be writing to.
  std::string get(const uint8_t* from, int64_t num_bytes) override {
    const c10::StreamGuard guard(c10::Stream(c10::Stream::DEFAULT, device_));
    const at::Tensor here =
        at::empty({num_bytes}, at::TensorOptions(at::kByte).device(device_));
    const auto size = static_cast<size_t>(num_bytes);
    std::string bytes(size, '\0');
    check_cuda(cudaMemcpy(here.mutable_data_ptr(), from, size,
                          cudaMemcpyDeviceToDevice),
               "cudaMemcpy");
    check_cuda(cudaMemcpy(bytes.data(), here.const_data_ptr(), size,
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    return bytes;
  }

  CopyQueue& outgoing() override { return outgoing_; }
  CopyQueue& incoming() override { return incoming_; }
  void stop() override {}

 private:
  static std::string name_of(int device) {
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, device),
               "cudaGetDeviceProperties");
    return {properties.uuid.bytes, sizeof(properties.uuid.bytes)};
  }

  const c10::Device device_;
  CudaQueue outgoing_;
  CudaQueue incoming_;
};

}  // namespace

std::unique_ptr<DeviceCopies> make_cuda_copies(c10::Device device,
                                               std::string& why_not) {
  if (!memory::kHasNativeHandles) {
    why_not = "this release of torch does not tell the handle of a stream";
    return nullptr;
  }
  return std::make_unique<CudaCopies>(device);
}

}  // namespace smp::lanes
