#include "tests/cpp/cuda_runtime/process.h"

#include <unistd.h>

#include <cstring>
#include <utility>

namespace smp::fake_cuda {
namespace {

Process* the_process = nullptr;  // as long as the process
thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaStream_t new_stream_locked(Process& own, int device) {
  const auto number = static_cast<uint64_t>(own.streams.size());
  auto* const stream =
      new CUstream_st(device, own.seed * 100 + number, own.max_us);
  own.streams.insert(stream);
  return stream;
}

}  // namespace

Process& process() {
  if (the_process == nullptr) give_up("a call before begin_process");
  return *the_process;
}

void begin_process(uint64_t seed, int max_us) {
  if (the_process != nullptr) give_up("a process begins twice");
  shared();
  the_process = new Process;
  the_process->pid = ::getpid();
  the_process->seed = seed;
  the_process->max_us = max_us;
}

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

cudaError_t failure() {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  if (own.pid != ::getpid()) return fail(cudaErrorInitializationError);
  return own.sticky == cudaSuccess ? cudaSuccess : fail(own.sticky);
}

cudaError_t enter(const char* name) {
  if (const cudaError_t status = failure(); status) return status;
  if (is_stream_thread()) give_up("a kernel calls the runtime");
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  own.contexts.insert(device_of_thread);
  if (++own.num_calls != own.failing_call) return cudaSuccess;
  own.failed_call = name;
  if (own.is_sticky) {
    own.sticky = own.injected;
    freeze_streams();
  }
  return fail(own.injected);
}

int current_device() { return device_of_thread; }

void note_violation(const std::string& text) {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  own.violations.push_back(text);
}

CUstream_st* find_stream(cudaStream_t stream) {
  if (stream == nullptr) return default_stream(device_of_thread);
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  return own.streams.count(stream) > 0 ? stream : nullptr;
}

CUstream_st* default_stream(int device) {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  cudaStream_t& found = own.default_streams.at(device);
  if (found == nullptr) found = new_stream_locked(own, device);
  return found;
}

// ------------------------------------------------------------- what tests ask

std::set<int> contexts() {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  return own.contexts;
}

Leaks leaks() {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  Leaks leaks{.num_events = static_cast<int>(own.events.size())};
  for (const auto& [address, block] : own.blocks) {
    if (block->is_opened) {
      ++leaks.num_opened;
    } else {
      ++leaks.num_blocks;
      leaks.num_bytes += static_cast<int64_t>(block->mapping.size);
      leaks.devices.insert(shared().blocks[block->number].device);
    }
  }
  return leaks;
}

std::vector<std::string> violations() {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  return own.violations;
}

int num_calls() {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  return own.num_calls;
}

void fail_call(int number, cudaError_t error, bool is_sticky) {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  own.failing_call = number;
  own.injected = error;
  own.is_sticky = is_sticky;
}

std::string failed_call() {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  return own.failed_call;
}

void freeze() { freeze_streams(); }

}  // namespace smp::fake_cuda

// -------------------------------------------------------- errors and devices

using smp::fake_cuda::fail;
using smp::fake_cuda::failure;
using smp::fake_cuda::process;
using smp::fake_cuda::shared;

cudaError_t cudaGetLastError() {
  // An error that stays is not cleared.
  const cudaError_t found =
      std::exchange(smp::fake_cuda::last_error, cudaSuccess);
  const std::lock_guard lock(process().mutex);
  return process().sticky == cudaSuccess ? found : process().sticky;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInitializationError:
      return "initialization error";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorDeviceUninitialized:
      return "invalid device context";
    case cudaErrorMapBufferObjectFailed:
      return "mapping of buffer object failed";
    case cudaErrorAlreadyMapped:
      return "resource already mapped";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetDeviceCount(int* count) {
  if (const cudaError_t status = failure(); status) return status;
  *count = shared().num_devices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = smp::fake_cuda::device_of_thread;
  return cudaSuccess;
}

// Makes a context, since CUDA 12.
cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t status = failure(); status) return status;
  if (device < 0 || device >= shared().num_devices) {
    return fail(cudaErrorInvalidDevice);
  }
  smp::fake_cuda::device_of_thread = device;
  const std::lock_guard lock(process().mutex);
  process().contexts.insert(device);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const cudaError_t status = failure(); status) return status;
  if (device < 0 || device >= shared().num_devices) {
    return fail(cudaErrorInvalidDevice);
  }
  *properties = {};
  std::strcpy(properties->name, "stand-in");
  std::memset(properties->uuid.bytes, 'a' + device,
              sizeof(properties->uuid.bytes));
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (const cudaError_t status = failure(); status) return status;
  *can = device == peer ? 0 : 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  FAKE_CUDA_CALL("cudaDeviceSynchronize");
  std::vector<cudaStream_t> streams;
  {
    const std::lock_guard lock(process().mutex);
    streams.assign(process().streams.begin(), process().streams.end());
  }
  for (const cudaStream_t stream : streams) {
    if (stream->device != smp::fake_cuda::device_of_thread) continue;
    if (!stream->drain()) return failure();
  }
  return cudaSuccess;
}

// ------------------------------------------------------------------- streams

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  FAKE_CUDA_CALL("cudaStreamCreateWithFlags");
  // Streams that wait for the default stream do not exist here.
  if (flags != cudaStreamNonBlocking) return fail(cudaErrorInvalidValue);
  const std::lock_guard lock(process().mutex);
  *stream = smp::fake_cuda::new_stream_locked(process(),
                                              smp::fake_cuda::device_of_thread);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  FAKE_CUDA_CALL("cudaStreamQuery");
  CUstream_st* const found = smp::fake_cuda::find_stream(stream);
  if (found == nullptr) return fail(cudaErrorInvalidResourceHandle);
  return found->has_done(found->num_asked()) ? cudaSuccess
                                             : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  FAKE_CUDA_CALL("cudaStreamSynchronize");
  CUstream_st* const found = smp::fake_cuda::find_stream(stream);
  if (found == nullptr) return fail(cudaErrorInvalidResourceHandle);
  return found->drain() ? cudaSuccess : failure();
}
