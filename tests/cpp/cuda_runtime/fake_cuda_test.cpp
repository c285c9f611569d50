#include "tests/cpp/cuda_runtime/fake_cuda.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/lanes/cuda/ranks.h"

// The rules of the stand-in itself.

namespace smp::fake_cuda {
namespace {

using lanes::Links;

constexpr size_t kSize = 1000;
constexpr int kSlowUs = 100'000;

void run(int size, const std::function<void(Links&)>& of_rank) {
  const Machine machine;
  lanes::expect_good(lanes::run_ranks(size, of_rank));
}

void run_alone(int max_us, const std::function<void()>& body) {
  run(1, [&](Links&) {
    begin_process(1, max_us);
    body();
  });
}

void* new_memory(size_t size = kSize) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, size), cudaSuccess);
  return memory;
}

cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
            cudaSuccess);
  return stream;
}

cudaEvent_t new_event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, flags), cudaSuccess);
  return event;
}

std::string read(const void* memory, size_t size = kSize) {
  std::string bytes(size, '\0');
  EXPECT_EQ(cudaMemcpy(bytes.data(), memory, size, cudaMemcpyDeviceToHost),
            cudaSuccess);
  return bytes;
}

const std::string kOnes(kSize, '\1');
const std::string kNaNs(kSize, '\xff');

TEST(FakeCuda, a_context_comes_into_being_with_the_first_call_on_a_device) {
  run_alone(0, [] {
    int count = 0;
    cudaDeviceProp properties;
    EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    EXPECT_EQ(cudaGetDeviceProperties(&properties, 1), cudaSuccess);
    EXPECT_EQ(count, 4);
    EXPECT_EQ(contexts(), std::set<int>{});
    EXPECT_EQ(cudaSetDevice(2), cudaSuccess);
    EXPECT_EQ(contexts(), std::set<int>{2});
    // Another thread has another device.
    std::thread([] { (void)new_event(); }).join();
    EXPECT_EQ(contexts(), (std::set<int>{0, 2}));
    EXPECT_EQ(cudaSetDevice(4), cudaErrorInvalidDevice);
  });
}

TEST(FakeCuda, copies_are_late_in_order_and_nan_until_they_end) {
  run_alone(kSlowUs, [] {
    void* const memory = new_memory();
    void* const other = new_memory();
    const cudaStream_t stream = new_stream();
    EXPECT_EQ(read(memory), kNaNs);
    EXPECT_EQ(cudaMemcpyAsync(memory, kOnes.data(), kSize,
                              cudaMemcpyHostToDevice, stream),
              cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(other, memory, kSize, cudaMemcpyDefault, stream),
              cudaSuccess);
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
    EXPECT_EQ(read(other), kOnes);
  });
}

TEST(FakeCuda, page_locked_memory_is_read_and_written_late) {
  run_alone(kSlowUs, [] {
    void* const memory = new_memory();
    void* host = nullptr;
    EXPECT_EQ(cudaHostAlloc(&host, kSize, 0), cudaSuccess);
    std::memset(host, 2, kSize);
    const cudaStream_t stream = new_stream();
    EXPECT_EQ(
        cudaMemcpyAsync(memory, host, kSize, cudaMemcpyHostToDevice, stream),
        cudaSuccess);
    std::memset(host, 1, kSize);  // too early
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(read(memory), kOnes);
    EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(host), cudaErrorInvalidValue);
  });
}

TEST(FakeCuda, a_copy_of_pageable_memory_may_return_before_it_is_there) {
  run_alone(kSlowUs, [] {
    void* const memory = new_memory();
    const cudaStream_t other = new_stream();
    std::string bytes = kOnes;
    EXPECT_EQ(cudaMemcpy(memory, bytes.data(), kSize, cudaMemcpyHostToDevice),
              cudaSuccess);
    bytes.assign(kSize, '\2');  // it was staged
    EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
    EXPECT_EQ(cudaStreamQuery(other), cudaSuccess);
    EXPECT_EQ(read(memory), kOnes);
  });
}

TEST(FakeCuda, waits_bind_to_the_last_record_at_the_time_of_the_call) {
  run_alone(kSlowUs, [] {
    const cudaEvent_t event = new_event();
    const cudaStream_t slow = new_stream();
    const cudaStream_t stream = new_stream();
    void* const memory = new_memory();
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess) << "never recorded";
    EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
    const auto copy_and_record = [&] {
      EXPECT_EQ(cudaMemcpyAsync(memory, kOnes.data(), kSize,
                                cudaMemcpyHostToDevice, slow),
                cudaSuccess);
      EXPECT_EQ(cudaEventRecord(event, slow), cudaSuccess);
    };
    copy_and_record();
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady)
        << "the wait was for no record";
    EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
    copy_and_record();
    EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
    EXPECT_EQ(violations(), std::vector<std::string>{});
  });
}

TEST(FakeCuda, events_and_kernels_need_their_device) {
  run_alone(0, [] {
    const cudaStream_t stream = new_stream();
    EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
    const cudaEvent_t event = new_event();
    EXPECT_EQ(cudaEventRecord(event, stream), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
    EXPECT_EQ(launch(stream, [] {}), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaErrorInvalidResourceHandle);
  });
}

TEST(FakeCuda, the_host_cannot_read_memory_of_a_device) {
  const Machine machine;
  const auto ends = lanes::run_ranks(1, [](Links&) {
    begin_process(1, 0);
    auto* const memory = static_cast<volatile char*>(new_memory());
    std::signal(SIGSEGV, [](int) { ::_exit(7); });
    (void)*memory;
  });
  EXPECT_EQ(ends[0].code, 7) << ends[0].output;
}

TEST(FakeCuda, memory_that_was_freed_is_not_used) {
  run_alone(kSlowUs, [] {
    void* const memory = new_memory();
    void* const busy = new_memory();
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
    EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
    std::string bytes(kSize, '\0');
    EXPECT_EQ(cudaMemcpy(bytes.data(), memory, kSize, cudaMemcpyDeviceToHost),
              cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemcpyAsync(busy, kOnes.data(), kSize, cudaMemcpyHostToDevice,
                              new_stream()),
              cudaSuccess);
    EXPECT_EQ(cudaFree(busy), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(new_memory(), kOnes.data(), kSize + 1,
                         cudaMemcpyHostToDevice),
              cudaErrorInvalidValue);
    EXPECT_EQ(violations().size(), 3u);
  });
}

TEST(FakeCuda, an_error_that_stays_fails_all_calls) {
  run_alone(0, [] {
    fail_call(2, cudaErrorMemoryAllocation, false);
    (void)new_event();
    cudaEvent_t event = nullptr;
    EXPECT_EQ(cudaEventCreateWithFlags(&event, 0), cudaErrorMemoryAllocation);
    EXPECT_EQ(failed_call(), "cudaEventCreateWithFlags");
    EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    (void)new_event();
    EXPECT_EQ(num_calls(), 3);
    fail_call(4, cudaErrorIllegalAddress, true);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaSetDevice(1), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  });
}

TEST(FakeCuda, memory_ends_with_the_device) {
  run_alone(0, [] {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, size_t{1} << 40), cudaErrorMemoryAllocation);
    EXPECT_EQ(leaks().num_blocks, 0);
  });
}

// ------------------------------------------------------------ two processes

template <typename Handle>
std::string bytes_of(const Handle& handle) {
  return {handle.reserved, sizeof(handle.reserved)};
}

template <typename Handle>
Handle handle_from(const std::string& bytes) {
  Handle handle{};
  std::memcpy(handle.reserved, bytes.data(), sizeof(handle.reserved));
  return handle;
}

cudaIpcMemHandle_t handle_of(void* memory) {
  cudaIpcMemHandle_t handle{};
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, memory), cudaSuccess);
  return handle;
}

cudaError_t open_memory(void** memory, const cudaIpcMemHandle_t& handle) {
  return cudaIpcOpenMemHandle(memory, handle, cudaIpcMemLazyEnablePeerAccess);
}

TEST(FakeCuda, memory_is_opened_once_by_another_process) {
  run(2, [](Links& links) {
    begin_process(1, 1000);
    if (links.rank() == 0) {
      void* const memory = new_memory();
      const cudaIpcMemHandle_t handle = handle_of(memory);
      void* again = nullptr;
      EXPECT_EQ(open_memory(&again, handle), cudaErrorDeviceUninitialized);
      EXPECT_EQ(cudaMemcpy(memory, kOnes.data(), kSize, cudaMemcpyHostToDevice),
                cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
      links.exchange(bytes_of(handle));
      links.exchange("opened");
      EXPECT_EQ(cudaFree(memory), cudaSuccess);
      EXPECT_EQ(violations().size(), 1u) << "another process has mapped it";
      links.exchange("freed");
    } else {
      const auto handle =
          handle_from<cudaIpcMemHandle_t>(links.exchange("")[0]);
      void* memory = nullptr;
      void* again = nullptr;
      EXPECT_EQ(open_memory(&memory, handle), cudaSuccess);
      EXPECT_EQ(open_memory(&again, handle), cudaErrorAlreadyMapped);
      EXPECT_EQ(read(memory), kOnes);
      links.exchange("opened");
      links.exchange("freed");
      EXPECT_EQ(read(memory), std::string(kSize, '\xdb'));
      EXPECT_EQ(leaks().num_opened, 1);
      EXPECT_EQ(cudaIpcCloseMemHandle(memory), cudaSuccess);
      EXPECT_EQ(cudaIpcCloseMemHandle(memory), cudaErrorInvalidValue);
      EXPECT_EQ(leaks().num_opened, 0);
      EXPECT_EQ(open_memory(&memory, handle), cudaErrorMapBufferObjectFailed);
      EXPECT_EQ(violations(), std::vector<std::string>{});
    }
    links.say_goodbye();
  });
}

TEST(FakeCuda, events_of_processes_bind_to_records_of_either) {
  run(2, [](Links& links) {
    begin_process(1, kSlowUs);
    const cudaStream_t stream = new_stream();
    if (links.rank() == 0) {
      cudaIpcEventHandle_t handle{};
      EXPECT_EQ(cudaIpcGetEventHandle(&handle, new_event()),
                cudaErrorInvalidResourceHandle);
      const cudaEvent_t event =
          new_event(cudaEventInterprocess | cudaEventDisableTiming);
      EXPECT_EQ(cudaIpcGetEventHandle(&handle, event), cudaSuccess);
      cudaEvent_t again = nullptr;
      EXPECT_EQ(cudaIpcOpenEventHandle(&again, handle),
                cudaErrorDeviceUninitialized);
      void* const memory = new_memory();
      EXPECT_EQ(cudaMemcpyAsync(memory, kOnes.data(), kSize,
                                cudaMemcpyHostToDevice, stream),
                cudaSuccess);
      EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
      links.exchange(bytes_of(handle));
      links.exchange("recorded");
      EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
      links.exchange("destroyed");
    } else {
      cudaEvent_t event = nullptr;
      EXPECT_EQ(
          cudaIpcOpenEventHandle(
              &event, handle_from<cudaIpcEventHandle_t>(links.exchange("")[0])),
          cudaSuccess);
      EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
      // A record of the other process is over, so this one may record.
      EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
      EXPECT_EQ(violations(), std::vector<std::string>{});
      links.exchange("recorded");
      links.exchange("destroyed");
      EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
      EXPECT_EQ(violations().size(), 1u);
      EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
      EXPECT_EQ(leaks().num_events, 0);
    }
    links.say_goodbye();
  });
}

TEST(FakeCuda, a_child_of_a_process_with_contexts_gets_an_error) {
  run_alone(0, [] {
    (void)new_event();
    const pid_t child = ::fork();
    if (child == 0) {
      cudaEvent_t event = nullptr;
      const bool is_refused =
          cudaEventCreateWithFlags(&event, 0) == cudaErrorInitializationError;
      ::_exit(is_refused ? 5 : 6);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 5);
  });
}

}  // namespace
}  // namespace smp::fake_cuda
