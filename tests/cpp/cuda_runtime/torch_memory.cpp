#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/cpp/cuda_runtime/torch_device.h"
#include "tests/cpp/cuda_runtime/torch_state.h"

// Memory of tensors. A block that is freed goes to the next tensor of its
// stream at once, as that of PyTorch, and is full of NaN from then on in the
// order of its stream.

namespace smp::fake_cuda {
namespace {

constexpr size_t kUnit = 512;

struct TensorBlock {
  void* begin = nullptr;
  size_t size = 0;
  c10::DeviceIndex device = 0;
  c10::StreamId stream_id = 0;
  std::set<c10::StreamId> other_streams = {};
  std::vector<std::function<bool()>> ends = {};  // of other streams

  c10::Stream stream(c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, torch_device(device), id);
  }
  bool is_unused() const {
    return std::all_of(ends.begin(), ends.end(),
                       [](const auto& is_over) { return is_over(); });
  }
};

using Key = std::tuple<c10::DeviceIndex, c10::StreamId, size_t>;

std::mutex mutex;
auto& in_use = *new std::map<void*, TensorBlock>;
auto& kept = *new std::multimap<Key, TensorBlock>;
int64_t num_bytes_in_use = 0;

// The thread's device does not matter, nor does a context come into being: the
// runtime itself is asked for the poison, in place of the next user's writes.
void poison_in_order(const TensorBlock& block) {
  poison(block.begin, block.size, native_of(block.stream(block.stream_id)));
}

void free_block(void* begin) {
  const std::lock_guard lock(mutex);
  const auto found = in_use.find(begin);
  TensorBlock block = std::move(found->second);
  in_use.erase(found);
  num_bytes_in_use -= static_cast<int64_t>(block.size);
  for (const c10::StreamId id : block.other_streams) {
    block.ends.push_back(
        end_of_work(native_of(block.stream(id)), block.device));
  }
  if (block.other_streams.empty()) poison_in_order(block);
  block.other_streams.clear();
  kept.emplace(Key{block.device, block.stream_id, block.size},
               std::move(block));
}

TensorBlock new_block_locked(const Key& key) {
  const auto& [device, stream_id, size] = key;
  const auto range = kept.equal_range(key);
  const auto found = std::find_if(range.first, range.second, [](auto& one) {
    return one.second.is_unused();
  });
  if (found != range.second) {
    TensorBlock block = std::move(found->second);
    kept.erase(found);
    if (!std::exchange(block.ends, {}).empty()) poison_in_order(block);
    return block;
  }
  TensorBlock block{nullptr, size, device, stream_id};
  check(cudaMalloc(&block.begin, size));
  return block;
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::DeviceIndex device = torch_get_device();
    if (num_bytes == 0) return {nullptr, torch_device(device)};
    const size_t size = (num_bytes + kUnit - 1) / kUnit * kUnit;
    const std::lock_guard lock(mutex);
    TensorBlock block =
        new_block_locked({device, torch_current_stream(device).id(), size});
    void* const begin = block.begin;
    num_bytes_in_use += static_cast<int64_t>(size);
    in_use.emplace(begin, std::move(block));
    return {begin, begin, &free_block, torch_device(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "storages of a device are not copied here");
  }
};

std::set<const void*>& pinned_blocks() {
  static auto* const blocks = new std::set<const void*>;
  return *blocks;
}

void free_pinned(void* begin) {
  {
    const std::lock_guard lock(mutex);
    pinned_blocks().erase(begin);
  }
  if (cudaFreeHost(begin) != cudaSuccess) (void)cudaGetLastError();
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* begin = nullptr;
    check(cudaHostAlloc(&begin, num_bytes, cudaHostAllocDefault));
    const std::lock_guard lock(mutex);
    pinned_blocks().insert(begin);
    return {begin, begin, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator);

}  // namespace

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  if (!data.get()) return;
  const std::lock_guard lock(mutex);
  TensorBlock& block = in_use.at(data.get());
  if (stream.id() != block.stream_id) block.other_streams.insert(stream.id());
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* pointer) {
  const std::lock_guard lock(mutex);
  return pinned_blocks().count(pointer) > 0;
}

int64_t bytes_of_tensors() {
  const std::lock_guard lock(mutex);
  return num_bytes_in_use;
}

void empty_cache() {
  const std::lock_guard lock(mutex);
  check(cudaDeviceSynchronize());
  for (const auto& [key, block] : kept) check(cudaFree(block.begin));
  kept.clear();
}

}  // namespace smp::fake_cuda
