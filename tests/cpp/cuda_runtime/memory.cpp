#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "tests/cpp/cuda_runtime/process.h"

// Memory of devices, handles of it for other processes, and copies.

namespace smp::fake_cuda {
namespace {

constexpr int kNaN = 0xff;
constexpr int kFreed = 0xdb;

struct MemoryHandle {
  uint64_t kind = 0x6d656d6f;
  int owner = 0;
  int number = 0;
};

uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

// Returns the entry of a map of ranges that begins at or before an address.
template <typename Map>
auto last_at(Map& ranges, uintptr_t address) {
  auto found = ranges.upper_bound(address);
  return found == ranges.begin() ? ranges.end() : std::prev(found);
}

// One side of a copy.
struct Span {
  uint8_t* bytes = nullptr;
  std::shared_ptr<Block> block;     // of a device
  std::shared_ptr<HostBlock> host;  // page-locked

  bool is_pageable() const { return !block && !host; }
};

// Returns nothing for memory that was freed, and past the end.
std::optional<Span> find_span(const void* pointer, size_t size,
                              const char* call) {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  const uintptr_t begin = address_of(pointer);
  if (const auto gone = last_at(own.gone, begin);
      gone != own.gone.end() && begin < gone->first + gone->second) {
    own.violations.push_back(std::string(call) +
                             " of memory that was freed or closed");
    return std::nullopt;
  }
  if (const auto found = last_at(own.blocks, begin);
      found != own.blocks.end()) {
    const std::shared_ptr<Block>& block = found->second;
    const uintptr_t offset = begin - found->first;
    if (offset < round_to_pages(block->mapping.size)) {
      if (offset + size <= block->mapping.size) {
        return Span{block->mapping.view + offset, block, nullptr};
      }
      own.violations.push_back(std::string(call) + " past the end of memory");
      return std::nullopt;
    }
  }
  Span span{static_cast<uint8_t*>(const_cast<void*>(pointer)), nullptr,
            nullptr};
  if (const auto found = last_at(own.host_blocks, begin);
      found != own.host_blocks.end() &&
      begin + size <= found->first + found->second->size) {
    span.host = found->second;
  }
  return span;
}

// Keeps memory from being freed silently while a stream uses it.
class Use {
 public:
  explicit Use(Span span) : span_(std::move(span)) {
    if (span_.block) ++span_.block->num_pending;
  }
  void end() const {
    if (span_.block) --span_.block->num_pending;
  }
  uint8_t* bytes() const { return span_.bytes; }

 private:
  const Span span_;
};

bool fits(cudaMemcpyKind kind, const Span& to, const Span& from) {
  const bool to_device = to.block != nullptr;
  const bool from_device = from.block != nullptr;
  switch (kind) {
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return to_device || from_device;
  }
  return false;
}

void ask_for_copy(CUstream_st& stream, const Span& to, const Span& from,
                  size_t size) {
  const auto writes = std::make_shared<const Use>(to);
  // Pageable memory is read at once, other memory when the copy is made.
  if (from.is_pageable()) {
    const std::vector<uint8_t> staged(from.bytes, from.bytes + size);
    stream.add_late(
        [writes, size] { std::memset(writes->bytes(), kNaN, size); },
        [writes, staged, size] {
          std::memcpy(writes->bytes(), staged.data(), size);
          writes->end();
        });
    return;
  }
  const auto reads = std::make_shared<const Use>(from);
  stream.add_late([writes, size] { std::memset(writes->bytes(), kNaN, size); },
                  [writes, reads, size] {
                    std::memcpy(writes->bytes(), reads->bytes(), size);
                    reads->end();
                    writes->end();
                  });
}

// The end of the host's wait.
enum class Wait {
  kForPageable,  // what cannot go on without it
  kForHost,      // until memory of the host may be read and written
};

cudaError_t copy(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                 cudaStream_t stream, Wait wait, const char* call) {
  FAKE_CUDA_CALL(call);
  CUstream_st* const on = find_stream(stream);
  if (on == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (size == 0) return cudaSuccess;
  const std::optional<Span> target = find_span(to, size, call);
  const std::optional<Span> source = find_span(from, size, call);
  if (!target || !source || !fits(kind, *target, *source)) {
    return fail(cudaErrorInvalidValue);
  }
  ask_for_copy(*on, *target, *source, size);
  const bool may_go_on =
      wait == Wait::kForPageable
          ? target->block || target->host
          : target->block && (source->block || source->is_pageable());
  if (may_go_on) return cudaSuccess;
  return on->drain() ? cudaSuccess : failure();
}

cudaError_t remove(void* pointer, bool is_opened, const char* call) {
  const cudaError_t status = enter(call);
  Process& own = process();
  std::unique_lock lock(own.mutex);
  const auto found = own.blocks.find(address_of(pointer));
  if (found == own.blocks.end() || found->second->is_opened != is_opened) {
    return fail(cudaErrorInvalidValue);
  }
  const std::shared_ptr<Block> block = found->second;
  own.gone[found->first] = round_to_pages(block->mapping.size);
  own.blocks.erase(found);
  SharedBlock& entry = shared().blocks[block->number];
  if (block->num_pending > 0) {
    own.violations.push_back(std::string(call) +
                             " of memory that a stream still uses");
  }
  if (is_opened) {
    --entry.num_opened;
    return status;
  }
  if (entry.num_opened > 0) {
    own.violations.push_back(std::string(call) +
                             " of memory that another process has mapped");
  }
  entry.is_freed = true;
  shared().bytes_in_use[entry.device] -= static_cast<int64_t>(entry.size);
  std::memset(block->mapping.view, kFreed, block->mapping.size);
  return status;
}

}  // namespace

HostBlock::HostBlock(size_t the_size)
    : begin(new uint8_t[the_size]), size(the_size) {
  std::memset(begin, kNaN, size);
}
HostBlock::~HostBlock() { delete[] begin; }

cudaError_t launch(cudaStream_t stream, std::function<void()> kernel) {
  FAKE_CUDA_CALL("a kernel");
  CUstream_st* const on = find_stream(stream);
  if (on == nullptr || on->device != current_device()) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  on->add_late([] {}, std::move(kernel));
  return cudaSuccess;
}

uint8_t* view(const void* pointer) {
  if (!is_stream_thread()) give_up("memory of a device, seen by the host");
  const std::optional<Span> span = find_span(pointer, 1, "a kernel");
  if (!span || !span->block) give_up("a kernel reads no memory of a device");
  return span->bytes;
}

void poison(void* pointer, size_t size, cudaStream_t stream) {
  const std::optional<Span> span = find_span(pointer, size, "poison");
  if (!span || !span->block) give_up("memory that is not a device's");
  const auto use = std::make_shared<const Use>(*span);
  const int device = shared().blocks[span->block->number].device;
  (stream ? stream : default_stream(device))->add([use, size] {
    std::memset(use->bytes(), kNaN, size);
    use->end();
  });
}

std::function<bool()> end_of_work(cudaStream_t stream, int device) {
  CUstream_st* const found = stream ? stream : default_stream(device);
  return [found, goal = found->num_asked()] { return found->has_done(goal); };
}

}  // namespace smp::fake_cuda

using smp::fake_cuda::Block;
using smp::fake_cuda::fail;
using smp::fake_cuda::HostBlock;
using smp::fake_cuda::MemoryHandle;
using smp::fake_cuda::process;
using smp::fake_cuda::shared;
using smp::fake_cuda::SharedBlock;
using smp::fake_cuda::SharedState;

cudaError_t cudaMalloc(void** pointer, size_t size) {
  FAKE_CUDA_CALL("cudaMalloc");
  const int device = smp::fake_cuda::current_device();
  SharedState& state = shared();
  const auto num_bytes = static_cast<int64_t>(size);
  const int number = state.next_block++;
  if (number >= SharedState::kMaxBlocks ||
      (state.bytes_in_use[device] += num_bytes) > state.device_bytes) {
    state.bytes_in_use[device] -= num_bytes;
    return fail(cudaErrorMemoryAllocation);
  }
  SharedBlock& entry = state.blocks[number];
  entry.owner = process().pid;
  entry.device = device;
  entry.size = size;
  entry.offset = state.next_offset.fetch_add(
      smp::fake_cuda::round_to_pages(std::max<size_t>(size, 1)));
  auto block = std::make_shared<Block>(number, false);
  std::memset(block->mapping.view, smp::fake_cuda::kNaN, size);
  *pointer = block->mapping.begin;
  const std::lock_guard lock(process().mutex);
  process().blocks[smp::fake_cuda::address_of(*pointer)] = std::move(block);
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  return smp::fake_cuda::remove(pointer, false, "cudaFree");
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned /*flags*/) {
  FAKE_CUDA_CALL("cudaHostAlloc");
  auto block = std::make_shared<HostBlock>(size);
  *pointer = block->begin;
  const std::lock_guard lock(process().mutex);
  process().host_blocks[smp::fake_cuda::address_of(*pointer)] =
      std::move(block);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  const cudaError_t status = smp::fake_cuda::enter("cudaFreeHost");
  const std::lock_guard lock(process().mutex);
  const auto num_freed =
      process().host_blocks.erase(smp::fake_cuda::address_of(pointer));
  return num_freed == 0 ? fail(cudaErrorInvalidValue) : status;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size,
                       cudaMemcpyKind kind) {
  return smp::fake_cuda::copy(to, from, size, kind, nullptr,
                              smp::fake_cuda::Wait::kForHost, "cudaMemcpy");
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  return smp::fake_cuda::copy(to, from, size, kind, stream,
                              smp::fake_cuda::Wait::kForPageable,
                              "cudaMemcpyAsync");
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  FAKE_CUDA_CALL("cudaIpcGetMemHandle");
  const std::lock_guard lock(process().mutex);
  const auto found = process().blocks.find(smp::fake_cuda::address_of(pointer));
  if (found == process().blocks.end() || found->second->is_opened) {
    return fail(cudaErrorInvalidValue);
  }
  const MemoryHandle made{.owner = process().pid,
                          .number = found->second->number};
  *handle = {};
  std::memcpy(handle, &made, sizeof(made));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle,
                                 unsigned flags) {
  FAKE_CUDA_CALL("cudaIpcOpenMemHandle");
  MemoryHandle asked;
  std::memcpy(static_cast<void*>(&asked), &handle, sizeof(asked));
  if (asked.kind != MemoryHandle{}.kind ||
      flags != cudaIpcMemLazyEnablePeerAccess) {
    return fail(cudaErrorInvalidValue);
  }
  if (asked.owner == process().pid) return fail(cudaErrorDeviceUninitialized);
  SharedBlock& entry = shared().blocks.at(asked.number);
  if (entry.is_freed) return fail(cudaErrorMapBufferObjectFailed);
  const std::lock_guard lock(process().mutex);
  for (const auto& [address, block] : process().blocks) {
    if (block->number == asked.number) return fail(cudaErrorAlreadyMapped);
  }
  auto block = std::make_shared<Block>(asked.number, true);
  ++entry.num_opened;
  *pointer = block->mapping.begin;
  process().blocks[smp::fake_cuda::address_of(*pointer)] = std::move(block);
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  return smp::fake_cuda::remove(pointer, true, "cudaIpcCloseMemHandle");
}
