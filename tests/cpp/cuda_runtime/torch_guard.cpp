#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "tests/cpp/cuda_runtime/torch_device.h"
#include "tests/cpp/cuda_runtime/torch_state.h"

// The calls of c10/cuda/impl/CUDAGuardImpl.h, in its order, so that contexts
// come into being where they do there.

namespace smp::fake_cuda {
namespace {

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : torch_get_device();
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kTorchType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    return torch_device(torch_exchange_device(to.index()));
  }
  c10::Device getDevice() const override {
    return torch_device(torch_get_device());
  }
  void setDevice(c10::Device to) const override {
    torch_set_device(to.index());
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    try {
      torch_maybe_set_device(to.index());
    } catch (const std::exception&) {  // there it is a warning
    }
  }
  c10::Stream getStream(c10::Device of) const noexcept override {
    return torch_current_stream(index_of(of));
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, torch_device(index_of(of)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return torch_new_stream(index_of(of));
  }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    return torch_exchange_stream(to);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return native_of(stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess
               ? static_cast<c10::DeviceIndex>(count)
               : c10::DeviceIndex{0};
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    auto native = static_cast<cudaEvent_t>(*event);
    const c10::DeviceIndex before = torch_get_device();
    torch_set_device(stream.device_index());
    if (native == nullptr) {
      check(cudaEventCreateWithFlags(&native,
                                     flag == c10::EventFlag::PYTORCH_DEFAULT
                                         ? cudaEventDisableTiming
                                         : cudaEventDefault));
    }
    const cudaError_t status = cudaEventRecord(native, native_of(stream));
    if (status != cudaSuccess && *event == nullptr) {
      (void)cudaEventDestroy(native);  // PyTorch leaks it
    }
    check(status);
    *event = native;
    torch_set_device(before);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const c10::DeviceIndex before = torch_get_device();
    torch_set_device(stream.device_index());
    check(cudaStreamWaitEvent(native_of(stream),
                              static_cast<cudaEvent_t>(event), 0));
    torch_set_device(before);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (status != cudaErrorNotReady) {
      check(status);
    } else {
      (void)cudaGetLastError();
    }
    return status == cudaSuccess;
  }
  void destroyEvent(void* event,
                    const c10::DeviceIndex device) const noexcept override {
    if (event == nullptr) return;
    try {
      const c10::DeviceIndex before = torch_get_device();
      torch_set_device(device);
      if (cudaEventDestroy(static_cast<cudaEvent_t>(event)) != cudaSuccess) {
        (void)cudaGetLastError();
      }
      torch_set_device(before);
    } catch (const std::exception&) {  // there it is a warning
    }
  }
  void synchronizeEvent(void* event) const override {
    if (event) check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    const cudaError_t status = cudaStreamQuery(native_of(stream));
    if (status == cudaErrorNotReady) return false;
    check(status);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check(cudaStreamSynchronize(native_of(stream)));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data,
                             const c10::Stream& stream) const override {
    record_stream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  // Not of all releases of torch.
  virtual bool isBuilt() const { return true; }
  virtual bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return contexts().count(device) > 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
};

const bool is_registered = [] {
  c10::register_privateuse1_backend("fake_cuda");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace smp::fake_cuda
