#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

// A stand-in for the CUDA runtime in processes without a GPU, for tests only.
// This header has what tests ask of it beside the functions of CUDA
// (docs/design/fake_cuda.md says what it promises).

namespace smp::fake_cuda {

struct MachineOptions {
  int num_devices = 4;
  int64_t device_bytes = int64_t{256} << 20;
};

/// A host with devices, shared by the processes that are forked while it lives.
/// The process that makes it makes no call of CUDA.
class Machine {
 public:
  explicit Machine(MachineOptions options = {});
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
};

/// Begins the calls of a forked process. Copies and kernels of its streams each
/// take a random time of up to `max_us`.
void begin_process(uint64_t seed, int max_us);

/// Returns the devices on which this process has a context.
std::set<int> contexts();

/// Objects of this process that are not destroyed, closed or freed.
struct Leaks {
  int num_events = 0;
  int num_opened = 0;  ///< mapped memory of other processes
  int num_blocks = 0;  ///< memory of devices
  int64_t num_bytes = 0;
  std::set<int> devices = {};  ///< of the blocks
};
Leaks leaks();

/// Returns the acts of this process that CUDA leaves undefined.
std::vector<std::string> violations();

/// Returns how many calls this process has made that may fail.
int num_calls();
/// Makes a call fail, `number` being counted as by `num_calls`. After a sticky
/// error all further calls fail as well, and no work of a stream goes on.
/// Calls that destroy, close and free do so even if they fail.
void fail_call(int number, cudaError_t error, bool is_sticky);
/// Returns the name of the call that was made to fail; empty: none was.
std::string failed_call();

/// Stops all streams of this process for good before their next copy.
void freeze();

/// Asks a stream for a kernel, which runs in a thread of its own. The stream
/// has to be one of the current device. A kernel gets at memory of devices by
/// `view`, and may run until `is_frozen`.
cudaError_t launch(cudaStream_t stream, std::function<void()> kernel);
uint8_t* view(const void* pointer);
bool is_frozen();

// The allocator of torch calls these; csrc does not.

/// Asks a stream to fill memory with NaN without delay, since it was freed.
void poison(void* pointer, size_t size, cudaStream_t stream);
/// Returns a function that tells whether the stream's work so far is over.
/// @param device  device of the stream, if that is the default one
std::function<bool()> end_of_work(cudaStream_t stream, int device);

}  // namespace smp::fake_cuda
