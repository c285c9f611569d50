// Devices, streams, events and generators, as c10 asks for them.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <memory>
#include <mutex>
#include <vector>

#include "tests/cpp/device/generator.h"
#include "tests/cpp/device/memory.h"
#include "tests/cpp/device/operators.h"
#include "tests/cpp/device/streams.h"

namespace smp::late {
namespace {

// An event: the point where it was recorded last, or none.
MarkPtr& mark_of(void* event) { return *static_cast<MarkPtr*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device(exchange_device(index_of(to)));
  }
  c10::Device getDevice() const override { return device(current_device()); }
  void setDevice(c10::Device to) const override {
    exchange_device(index_of(to));
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    exchange_device(index_of(to));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(num_devices());
  }

  c10::Stream getStream(c10::Device of) const override {
    return current_stream(index_of(of));
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, device(index_of(of)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of,
                                      bool is_high) const override {
    return stream_of_pool(index_of(of), is_high);
  }
  c10::Stream getNewStream(c10::Device of, int priority) const override {
    return stream_of_pool(index_of(of), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return exchange_stream(to);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.hash());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new MarkPtr;
    mark_of(*event) = mark_end(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait_for(stream, mark_of(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || mark_of(event)->is_fired();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) drain_mark(mark_of(event));
  }
  double elapsedTime(void* from, void* to,
                     const c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(from) && queryEvent(to),
                "late device: both events must have fired");
    const int64_t ns = mark_of(to)->fired_ns() - mark_of(from)->fired_ns();
    return static_cast<double>(ns) / 1e6;
  }
  void destroyEvent(void* event,
                    const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }

  bool queryStream(const c10::Stream& stream) const override {
    return is_idle(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    drain(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    drain_device(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data,
                             const c10::Stream& stream) const override {
    record_use(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Generator final : public at::CPUGeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index) {
    device_ = late::device(index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  Generator* clone_impl() const override {
    auto copy = std::make_unique<Generator>(device_.index());
    copy->set_state(*get_state());
    return copy.release();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(num_devices());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    exchange_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchange_device(index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const int index = device_of(data);
    TORCH_CHECK(index >= 0, "late device: ", data, " is not device memory");
    return device(static_cast<c10::DeviceIndex>(index));
  }
  const at::Generator& getDefaultGenerator(
      c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current_device() : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? current_device() : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              size_t num_bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), num_bytes);
  }
};

const bool is_registered = [] {
  c10::register_privateuse1_backend("late");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kType, &allocator());
  return true;
}();

}  // namespace

// --------------------------------------------------------------- generators

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Generator>(index);
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto& all = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> generators;
    for (int i = 0; i < num_devices(); ++i) {
      generators.push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    }
    return generators;
  }());
  return all.at(index);
}

void store_state(const at::Generator& from, at::Generator to) {
  const at::Tensor state = from.get_state();
  const std::lock_guard lock(to.mutex());
  to.set_state(state);
}

at::Generator on_cpu(const at::Generator& generator) {
  at::Generator copy = at::make_generator<at::CPUGeneratorImpl>();
  store_state(generator, copy);
  return copy;
}

AsDefaultOfCpu::AsDefaultOfCpu(c10::DeviceIndex index)
    : ours_(default_generator(index)),
      before_(on_cpu(at::detail::getDefaultCPUGenerator())) {
  store_state(ours_, at::detail::getDefaultCPUGenerator());
}

AsDefaultOfCpu::~AsDefaultOfCpu() {
  store_state(at::detail::getDefaultCPUGenerator(), ours_);
  store_state(before_, at::detail::getDefaultCPUGenerator());
}

}  // namespace smp::late
