#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/cuda_runtime/machine.h"
#include "tests/cpp/cuda_runtime/streams.h"

// The part of the stand-in that each process has for itself.

namespace smp::fake_cuda {

/// Memory of a device as this process has it, its own or another's.
struct Block {
  Block(int the_number, bool opened)
      : number(the_number),
        is_opened(opened),
        mapping(shared().blocks[the_number]) {}

  const int number;
  const bool is_opened;
  const Mapping mapping;
  std::atomic<int> num_pending{0};  // works of streams
};

/// Page-locked memory. Works of streams keep it, as torch's allocator does.
struct HostBlock {
  explicit HostBlock(size_t the_size);
  ~HostBlock();
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  uint8_t* begin;
  const size_t size;
};

struct Event {
  int device = 0;
  unsigned flags = 0;
  std::shared_ptr<Records> records = {};
  SharedRecords* between_processes = nullptr;
  bool is_opened = false;
  cudaStream_t last_stream = nullptr;
  uint64_t last_record = 0;
};
using EventPtr = std::shared_ptr<Event>;

struct Process {
  int pid = 0;
  uint64_t seed = 0;
  int max_us = 0;

  std::mutex mutex;  // guards all that follows
  std::set<int> contexts;
  std::map<uintptr_t, std::shared_ptr<Block>> blocks;  // by address
  std::map<uintptr_t, size_t> gone;                    // freed or closed
  std::map<uintptr_t, std::shared_ptr<HostBlock>> host_blocks;
  std::map<cudaEvent_t, EventPtr> events;
  std::set<int> opened_events;  // numbers
  std::set<cudaStream_t> streams;
  std::array<cudaStream_t, SharedState::kMaxDevices> default_streams{};
  std::vector<std::string> violations;
  int num_calls = 0;
  int failing_call = 0;
  cudaError_t injected = cudaSuccess;
  bool is_sticky = false;
  std::string failed_call;
  cudaError_t sticky = cudaSuccess;
};

Process& process();
/// Stores the error as the thread's last one.
cudaError_t fail(cudaError_t error);
/// Counts a call that may fail, and makes a context on the current device.
/// @return its error, if it is to fail
cudaError_t enter(const char* name);
/// Returns the error of a device that has failed, and no other one.
cudaError_t failure();
int current_device();
void note_violation(const std::string& text);
/// Returns null for a handle of no stream.
CUstream_st* find_stream(cudaStream_t stream);
CUstream_st* default_stream(int device);

}  // namespace smp::fake_cuda

/// Returns from a call that is to fail.
#define FAKE_CUDA_CALL(name)                                          \
  if (const cudaError_t status = smp::fake_cuda::enter(name); status) \
  return status
